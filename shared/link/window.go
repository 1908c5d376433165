package link

import "time"

// window decides how much may be under way unacknowledged. It starts small
// and follows twice the product of rate and round trip, so that a slow reader
// (a low rate) does not make it grow while a long way does.
type window struct {
	size, max int

	rtt      time.Duration // the smallest seen, 0: none yet
	samples  int
	sampling bool
	mark     uint64 // the sample ends when this offset is acknowledged
	since    time.Time

	limited  bool // the writer stood before a full window in this epoch
	epoch    time.Time
	epochAck uint64
}

// sent starts a sample of the round trip now and then: the clock is not free.
func (w *window) sent(end uint64) {
	if w.sampling || w.samples > 8 && w.samples%64 != 0 {
		return
	}
	w.sampling, w.mark, w.since = true, end, time.Now()
}

// full notes that a writer waits for room.
func (w *window) full(ack uint64) {
	if w.limited || w.size >= w.max {
		return
	}
	w.limited = true
	if w.epoch.IsZero() {
		w.epoch, w.epochAck = time.Now(), ack
	}
}

// acked takes in an acknowledgement that moved forward.
func (w *window) acked(ack uint64) {
	if !w.sampling {
		w.samples++
	} else if ack >= w.mark {
		d := max(time.Since(w.since), time.Microsecond)
		if w.rtt == 0 || d < w.rtt {
			w.rtt = d
		}
		w.sampling = false
		w.samples++
	}
	if w.limited && w.rtt > 0 {
		w.grow(ack)
	}
}

func (w *window) grow(ack uint64) {
	d := time.Since(w.epoch)
	if d < max(w.rtt, time.Millisecond) {
		return
	}
	rate := float64(ack-w.epochAck) / d.Seconds()
	if want := int(min(2*rate*w.rtt.Seconds(), float64(w.max))); want > w.size {
		w.size = want
	}
	w.limited, w.epoch = false, time.Time{}
}

// reset starts measuring anew on another transport; the size stays.
func (w *window) reset() {
	*w = window{size: w.size, max: w.max}
}
