package microvm

import (
	"time"

	"golang.org/x/sys/unix"
)

// rdtsc reads the processor's time stamp counter.
func rdtsc() uint64

// tscKHz is the rate of this host's time stamp counter, kHz, which an emulated
// processor's counter has too. The kernel keeps CLOCK_MONOTONIC_RAW by that
// counter, so a fifth of a second gives the rate that the kernel found at its
// own start to about one part in a million.
func tscKHz() int64 {
	ticks, at := tscNow()
	time.Sleep(200 * time.Millisecond)
	ticks2, at2 := tscNow()
	return int64(float64(ticks2-ticks)*1e6/float64(at2-at) + 0.5)
}

// tscNow pairs the counter with the clock, ns: of several tries the one that
// was interrupted least.
func tscNow() (ticks uint64, ns int64) {
	best := ^uint64(0)
	for range 100 {
		before := rdtsc()
		var ts unix.Timespec
		if err := unix.ClockGettime(unix.CLOCK_MONOTONIC_RAW, &ts); err != nil {
			panic(err) // a clock that every kernel has
		}
		after := rdtsc()
		if after-before < best {
			best, ticks, ns = after-before, before+(after-before)/2, ts.Nano()
		}
	}
	return ticks, ns
}
