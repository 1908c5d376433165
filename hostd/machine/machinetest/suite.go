package machinetest

import "testing"

// test is one of the suite's. Some look at a machine's processes from the host,
// or expect what only a kernel shared with the host does: ownKernel then says
// why the test does not fit a machine with a kernel of its own.
type test struct {
	name      string
	run       func(*Rig)
	ownKernel string
}

var tests = []test{
	{name: "Lifecycle", run: lifecycle},
	{name: "StartsAtOnce", run: startsAtOnce},
	{name: "Sequence", run: sequence},
	{name: "StopInEveryState", run: stopInEveryState},
	{name: "StopWithoutPatience", run: stopWithoutPatience},
	{name: "FailedStarts", run: failedStarts},
	{name: "MissingImage", run: missingImage},
	{name: "CanceledStarts", run: canceledStarts},
	{name: "KilledFirstProcess", run: killedFirstProcess},
	{name: "Adopt", run: adopt},
	{name: "AdoptTheDead", run: adoptTheDead},
	{name: "Sweep", run: sweep},
	{name: "CrashedHost", run: crashedHost},
	{name: "Memory", run: memoryLimit, ownKernel: "there is no more memory inside than the machine has, and it takes a minute to touch where it is emulated"},
	{name: "Pids", run: pidsLimit, ownKernel: "the guest's processes are not the host's to count"},
	{name: "Disk", run: diskLimit, ownKernel: "the root file system is image and disk in one, so that its size is no measure"},
	{name: "Attempts", run: hostileAttempts, ownKernel: "root inside is root of its own kernel: mounts, modules and clock are its to change"},
	{name: "Confinement", run: confinement, ownKernel: "there are no host ids, interfaces and files inside that could show"},
	{name: "SetUID", run: setUID},
	{name: "Sudo", run: sudoWorks},
	{name: "Chrome", run: chromeConfinesItself, ownKernel: "its only namespaces and filters are Chrome's own, which tests of the whole see"},
}

// keeperTests are for drivers whose captures keep memory.
var keeperTests = []test{
	{name: "CaptureRestore", run: captureRestore},
	{name: "CaptureAborted", run: captureAborted},
	{name: "AdoptFrozen", run: adoptFrozen},
	{name: "RestoreRefused", run: restoreRefused},
	{name: "Templates", run: templates},
	{name: "Generations", run: generations},
	{name: "FilledDisk", run: filledDisk},
}

// Run puts a driver through the whole suite.
func Run(t *testing.T, s Subject) {
	for _, test := range tests {
		if s.OwnKernel && test.ownKernel != "" {
			t.Logf("%s does not fit: %s", test.name, test.ownKernel)
			continue
		}
		t.Run(test.name, func(t *testing.T) { test.run(NewRig(t, s)) })
	}
	if s.Sibling == nil {
		return
	}
	for _, test := range keeperTests {
		t.Run(test.name, func(t *testing.T) { test.run(NewRig(t, s)) })
	}
}
