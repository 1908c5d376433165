package link

import (
	"bytes"
	"testing"
	"testing/synctest"
	"time"

	"pgregory.net/rapid"
)

// TestSendQueue drives a queue as a Conn does, against a plain byte slice: the
// frames taken since the last rewind are the stream from that offset on.
func TestSendQueue(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		var q sendQueue
		defer q.drop()
		var all []byte  // written, by stream offset
		var wire []byte // what this transport has carried
		from := uint64(0)
		sizes := rapid.SampledFrom([]int{1, 5, 100, 4000, 70000, 300000})
		for range rapid.IntRange(1, 60).Draw(t, "steps") {
			switch rapid.IntRange(0, 4).Draw(t, "step") {
			case 0, 1:
				p := make([]byte, sizes.Draw(t, "write"))
				for i := range p {
					p[i] = pattern(0, len(all)+i)
				}
				n := q.add(p, 0)
				if n == 0 {
					t.Fatal("nothing added")
				}
				all = append(all, p[:n]...)
			case 2:
				b, _ := q.take()
				if b == nil {
					continue
				}
				n := len(b)
				if rapid.Bool().Draw(t, "partial") {
					n = rapid.IntRange(0, len(b)).Draw(t, "n")
				}
				wire = append(wire, b[:n]...)
				if !q.taken(len(b), n) {
					t.Fatal("nothing was acknowledged meanwhile")
				}
			case 3:
				got := sentBytes(t, wire)
				ack := from + uint64(rapid.IntRange(0, got).Draw(t, "ack"))
				if !q.release(ack) {
					t.Fatalf("refused to release %d of %d sent", ack, got)
				}
			case 4:
				got := sentBytes(t, wire)
				to := max(q.base, from+uint64(rapid.IntRange(0, got).Draw(t, "received")))
				if !q.rewind(to) {
					t.Fatalf("refused to rewind to %d", to)
				}
				from, wire = to, nil
			}
		}
		for b, _ := q.take(); b != nil; b, _ = q.take() {
			wire = append(wire, b...)
			q.taken(len(b), len(b))
		}
		_, payload, err := frames(wire, 1<<30)
		if err != nil || !bytes.Equal(payload, all[from:]) {
			t.Fatalf("%d bytes on the wire, want %d, %v", len(payload), len(all)-int(from), err)
		}
		if q.end != uint64(len(all)) || !q.release(q.end) || q.mem != 0 || q.head != nil {
			t.Fatalf("end %d, %d bytes kept", q.end, q.mem)
		}
	})
}

// sentBytes counts the payload in frames of which the last may be cut.
func sentBytes(t *rapid.T, wire []byte) int {
	_, payload, err := frames(wire, 1<<30)
	if err != nil {
		t.Fatal(err)
	}
	return len(payload)
}

// TestReleaseOfUnsent: an acknowledgement of what never left is refused.
func TestReleaseOfUnsent(t *testing.T) {
	var q sendQueue
	defer q.drop()
	q.add(make([]byte, 10), 0)
	if q.release(10) {
		t.Fatal("released")
	}
	b, _ := q.take()
	q.taken(len(b), 15)
	if q.release(10) {
		t.Fatal("released half a frame")
	}
	if q.rewind(11) {
		t.Fatal("rewound beyond the end")
	}
	q.add(make([]byte, 10), 0)
	if !q.rewind(4) || q.rewind(3) {
		t.Fatal("rewind to 4, and not before")
	}
}

// TestRecordsJoin: small writes during a slow one become one frame, which
// carries the last one's acknowledgement.
func TestRecordsJoin(t *testing.T) {
	var q sendQueue
	defer q.drop()
	q.add([]byte("a"), 0)
	b, _ := q.take()
	for i := range 100 {
		q.add([]byte("b"), uint64(i))
	}
	q.taken(len(b), len(b))
	b, _ = q.take()
	if len(b) != headerLen+100 {
		t.Fatalf("%d bytes for 100 writes", len(b))
	}
	if h, err := parseHeader(b); err != nil || h.ack != 99 {
		t.Fatalf("acknowledges %d, %v", h.ack, err)
	}
	q.taken(len(b), len(b))
}

// flow simulates a writer that always has data: window by window, rtt apart,
// and a reader that takes at most rate bytes a second.
func flow(w *window, rtt time.Duration, rate float64) {
	end, acked := uint64(0), uint64(0)
	w.sent(1)
	time.Sleep(rtt)
	w.acked(1)
	acked, end = 1, 1
	for range 300 {
		end = acked + uint64(w.size)
		w.sent(end)
		w.full(acked)
		time.Sleep(max(rtt, time.Duration(float64(w.size)/rate*1e9)))
		acked = end
		w.acked(acked)
	}
}

func TestWindow(t *testing.T) {
	for name, c := range map[string]struct {
		rtt      time.Duration
		rate     float64
		min, max int
	}{
		"long way":          {100 * time.Millisecond, 1e9, 16 << 20, 16 << 20},
		"slow reader":       {time.Millisecond, 1e6, 1 << 20, 1 << 20},
		"near and fast":     {50 * time.Microsecond, 2e9, 1 << 20, 1 << 20},
		"long way, limited": {100 * time.Millisecond, 40e6, 6 << 20, 10 << 20},
	} {
		synctest.Test(t, func(t *testing.T) {
			w := window{size: 1 << 20, max: 16 << 20}
			flow(&w, c.rtt, c.rate)
			if w.size < c.min || w.size > c.max {
				t.Errorf("%s: window of %d KiB, want %d to %d", name, w.size>>10, c.min>>10, c.max>>10)
			}
		})
	}
}
