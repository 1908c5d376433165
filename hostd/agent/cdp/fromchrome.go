package cdp

import (
	"bufio"
	"errors"
	"fmt"
)

var errChromeClosed = errors.New("chrome closed the connection")

// fromChrome copies Chrome's frames to the client until Chrome ends. Frames
// pass as they are: Chrome's are unmasked, as the client's must be.
func (r *relay) fromChrome() error {
	for {
		f, err := peekFrame(r.chrome.in)
		if err != nil {
			return fmt.Errorf("from chrome: %w", err)
		}
		switch {
		case f.opcode == opClose:
			return fmt.Errorf("from chrome: %w", errChromeClosed)
		case f.masked:
			return fmt.Errorf("from chrome: %w: masked", errFrame)
		case r.naming.Load() && f.fin && f.opcode == opText && f.length <= maxDownloadEvent:
			err = r.lookAtEvent(f)
		case r.chrome.in.Buffered() >= f.size+int(min(f.length, chromeBuffer)):
			err = r.passWhole(f)
		default:
			err = r.passStreaming(f)
		}
		if err != nil {
			return fmt.Errorf("from chrome: %w", err)
		}
	}
}

// passWhole passes all frames that lie whole in the buffer with one write.
func (r *relay) passWhole(f frame) error {
	in := r.chrome.in
	n := f.size + int(f.length)
	for !r.naming.Load() {
		next, ok := wholeFrame(in, n)
		if !ok {
			break
		}
		n += next
	}
	b, err := in.Peek(n)
	if err != nil {
		return err
	}
	if err := r.send(b); err != nil {
		return err
	}
	_, err = in.Discard(n)
	return err
}

// wholeFrame gives the size of the data frame at offset of what is buffered,
// if it lies there whole. Malformed ones are left to peekFrame.
func wholeFrame(in *bufio.Reader, offset int) (int, bool) {
	b, _ := in.Peek(in.Buffered())
	b = b[offset:]
	if len(b) < 2 || b[0]&rsvBits != 0 || b[0]&0xF > opBinary || b[1] > 126 {
		return 0, false
	}
	size, length := 2, int(b[1])
	if length == 126 {
		if len(b) < 4 {
			return 0, false
		}
		size, length = 4, int(b[2])<<8|int(b[3])
	}
	return size + length, len(b) >= size+length
}

// passStreaming passes a frame that is larger than what is buffered, part by
// part, with the client's write side held so that nothing comes in between.
func (r *relay) passStreaming(f frame) error {
	r.out.Lock()
	defer r.out.Unlock()
	if r.closing {
		return errLeft
	}
	r.broken = true // until the frame is through
	in := r.chrome.in
	for left := int64(f.size) + f.length; left > 0; {
		if _, err := in.Peek(1); err != nil {
			return err
		}
		part, err := in.Peek(int(min(int64(in.Buffered()), left)))
		if err != nil {
			return err
		}
		if _, err := r.client.Write(part); err != nil {
			return err
		}
		_, _ = in.Discard(len(part))
		left -= int64(len(part))
	}
	r.broken = false
	return nil
}

// lookAtEvent passes one message of Chrome's to a client that named downloads
// by GUID, acting on what it says of downloads.
func (r *relay) lookAtEvent(f frame) error {
	msg, err := readPayload(r.chrome.in, f, make([]byte, 0, f.length))
	if err != nil {
		return err
	}
	out, pass := r.names.event(msg)
	if !pass {
		return nil
	}
	return r.sendText(out)
}
