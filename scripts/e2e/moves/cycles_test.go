package moves

import (
	"fmt"
	"testing"
	"time"

	"github.com/berth-dev/berth/scripts/testenv"
)

// Twenty-five times paused and resumed while files change, on the disk and in
// memory: all is there each time, and what is kept of the past does not grow.
func TestManyCyclesWithChangingFiles(t *testing.T) {
	env := memory.Start(t)
	c := env.Client(t, "Scale")
	s := create(t, c, testenv.Fields{"browser": false, "shell": true, "timeout": 7200})
	c.Output(s.Id, "mkdir -p /dev/shm/m; for i in $(seq 0 7); do head -c 400000 /dev/urandom > f$i; done; : > log")
	kept := func() int64 { return env.SnapshotBytes(testenv.HostName(0)) + env.SnapshotBytes(testenv.HostName(1)) }
	before := kept() // what other tests' sessions left until it is swept
	var first, most int64
	var took time.Duration
	for i := range soak(25, 100) {
		sums := c.Output(s.Id, fmt.Sprintf("head -c 400000 /dev/urandom > f%d; head -c 300000 /dev/urandom > /dev/shm/m/f%d; rm -f f%d; echo %d >> log; R=$RANDOM; cat f* log /dev/shm/m/* | sha256sum; echo $R",
			i%8, i%4, (i+4)%8, i))
		began := time.Now()
		pause(c, s.Id)
		took += time.Since(began)
		bytes := kept() - before // of this one and, for a moment, the one before
		if i == 0 {
			first = bytes
		}
		most = max(most, bytes)
		resume(c, s.Id)
		if got := c.Output(s.Id, "cat f* log /dev/shm/m/* | sha256sum; echo $R"); got != sums {
			t.Fatalf("cycle %d: %q became %q", i, sums, got)
		}
	}
	if most > 3*first {
		t.Errorf("snapshots took %d KiB at the first pause and %d KiB later", first>>10, most>>10)
	}
	t.Logf("snapshots: %d KiB at first, %d KiB at most; a pause took %s", first>>10, most>>10, took/time.Duration(soak(25, 100)))
}
