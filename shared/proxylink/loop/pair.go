package loop

import (
	"runtime"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"
)

// pairs are the process's loops. Each has two descriptors as long as the process.
var pairs struct {
	once  sync.Once
	err   error
	quick []*Loop
	next  atomic.Uint32
}

// quicks gives the loops where connections begin: one for two processors, with
// another one each for bulk.
func quicks() ([]*Loop, error) {
	pairs.once.Do(func() {
		for range max(1, runtime.NumCPU()/2) {
			l, err := newPair()
			if err != nil {
				pairs.err = err
				return
			}
			pairs.quick = append(pairs.quick, l)
		}
	})
	return pairs.quick, pairs.err
}

// Threads is how many processors of Go's the loops occupy at most.
func Threads() int { return 2 * max(1, runtime.NumCPU()/2) }

func newPair() (*Loop, error) {
	quick, err := newLoop(quickQuota)
	if err != nil {
		return nil, err
	}
	if quick.bulk, err = newLoop(bulkQuota); err != nil {
		return nil, err
	}
	quick.bulk.quick = quick
	return quick, nil
}

// slice is how long a loop's thread may run while others wait for its processor:
// as long as it takes to move a quota. Bulk's share stays what it was, but who
// wakes up beside it, and has little to do, waits for a tenth of the usual time;
// and quick does not wait for others' slices to end.
const slice = 100 * time.Microsecond

// askSlice asks for such slices for the calling thread, 0 for the usual ones
// (sched_setattr(2), since Linux 6.12; earlier ones do nothing). Without it all
// works, less evenly.
func askSlice(d time.Duration) {
	attr, err := unix.SchedGetAttr(0, 0)
	if err != nil || attr.Policy != unix.SCHED_NORMAL {
		return
	}
	attr.Runtime = uint64(d.Nanoseconds())
	_ = unix.SchedSetAttr(0, attr, 0)
}
