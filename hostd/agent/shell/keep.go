package shell

import "unicode/utf8"

// keepLimit is how many bytes of each stream an answer holds (decisions
// "Streams"): the first and the last half.
const keepLimit = 1 << 20

// halves keeps the first and the last half of what is written to it.
type halves struct {
	limit int
	head  []byte
	tail  []byte // ring once it is limit/2 long
	next  int    // where the ring continues
	lost  bool   // something fell out of the middle
}

func (h *halves) Write(p []byte) (int, error) {
	n := len(p)
	half := h.limit / 2
	if room := half - len(h.head); room > 0 {
		take := min(room, len(p))
		h.head = append(h.head, p[:take]...)
		p = p[take:]
	}
	if len(p) > half {
		p, h.lost = p[len(p)-half:], true
	}
	if room := half - len(h.tail); room > 0 {
		take := min(room, len(p))
		h.tail = append(h.tail, p[:take]...)
		p = p[take:]
	}
	for len(p) > 0 {
		h.lost = true
		took := copy(h.tail[h.next:], p)
		h.next = (h.next + took) % half
		p = p[took:]
	}
	return n, nil
}

// text is what was kept, as it is where nothing was lost. A cut in the middle
// takes the characters it split with it.
func (h *halves) text() string {
	head, tail := h.head, h.tail
	if h.next > 0 {
		tail = append(append(make([]byte, 0, len(h.tail)), h.tail[h.next:]...), h.tail[:h.next]...)
	}
	if h.lost {
		head = head[:len(head)-split(head)]
		for i := 0; i < utf8.UTFMax-1 && len(tail) > 0 && !utf8.RuneStart(tail[0]); i++ {
			tail = tail[1:]
		}
	}
	return string(head) + string(tail)
}

// split is how many bytes at the end of p begin a UTF-8 sequence that the next
// bytes may complete: 0 to 3.
func split(p []byte) int {
	for n := 1; n < utf8.UTFMax && n <= len(p); n++ {
		c := p[len(p)-n]
		if utf8.RuneStart(c) {
			if c >= utf8.RuneSelf && !utf8.FullRune(p[len(p)-n:]) {
				return n
			}
			return 0
		}
	}
	return 0
}
