package machinetest

import "testing"

// Run puts a driver through the whole suite.
func Run(t *testing.T, s Subject) {
	tests := []struct {
		name string
		run  func(*Rig)
	}{
		{"Lifecycle", lifecycle},
		{"StartsAtOnce", startsAtOnce},
		{"Sequence", sequence},
		{"StopInEveryState", stopInEveryState},
		{"StopWithoutPatience", stopWithoutPatience},
		{"FailedStarts", failedStarts},
		{"MissingImage", missingImage},
		{"CanceledStarts", canceledStarts},
		{"KilledFirstProcess", killedFirstProcess},
		{"Adopt", adopt},
		{"AdoptTheDead", adoptTheDead},
		{"Sweep", sweep},
		{"CrashedHost", crashedHost},
		{"Memory", memoryLimit},
		{"Pids", pidsLimit},
		{"Disk", diskLimit},
		{"Attempts", hostileAttempts},
		{"Confinement", confinement},
		{"SetUID", setUID},
		{"Sudo", sudoWorks},
		{"Chrome", chromeConfinesItself},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) { test.run(NewRig(t, s)) })
	}
}
