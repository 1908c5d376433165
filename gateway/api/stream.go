package api

import (
	"io"
	"net"
	"sync"
	"time"
)

// Buffers of bodies that are carried through. Large, since a file of 100 MB
// should cost hundreds of reads and writes, not ten thousands.
const bufferSize = 256 << 10

var buffers = sync.Pool{New: func() any { b := make([]byte, bufferSize); return &b }}

// streamBody is an answer that is written after the handler returned, as src
// gives it. It implements fasthttp.BodyWriterTo, so that our buffer is the
// only one: with a known length each Write goes straight to the connection,
// without one each Write is a chunk, flushed at once.
type streamBody struct {
	call *call
	src  io.Reader
	// broken gives a last piece to send when src fails; nil: the answer is cut,
	// which the client notices.
	broken func(err error, last byte) []byte
	closer io.Closer // of src, may be nil
}

// answerStream sends src as the body; size -1 means unknown. c is released
// when it is out or the client has left.
func (c *call) answerStream(b *streamBody, size int) {
	b.call = c
	c.stream = true
	c.rc.SetBodyStream(b, size)
}

// SupportsBodyWriteTo implements fasthttp.BodyWriterTo.
func (b *streamBody) SupportsBodyWriteTo() bool { return true }

// Read implements io.Reader.
func (b *streamBody) Read(p []byte) (int, error) { return b.src.Read(p) }

// WriteTo implements io.WriterTo.
func (b *streamBody) WriteTo(w io.Writer) (total int64, err error) {
	buf := buffers.Get().(*[]byte)
	defer buffers.Put(buf)
	conn := b.call.rc.Conn()
	defer func() { _ = conn.SetWriteDeadline(time.Time{}) }()
	last := byte('\n')
	for {
		n, errRead := b.src.Read(*buf)
		if n > 0 {
			last = (*buf)[n-1]
			if err := b.write(w, conn, (*buf)[:n]); err != nil {
				return total, err
			}
			total += int64(n)
		}
		switch {
		case errRead == io.EOF:
			return total, nil
		case errRead != nil && b.broken != nil:
			return total, b.write(w, conn, b.broken(errRead, last))
		case errRead != nil:
			return total, errRead
		}
	}
}

func (b *streamBody) write(w io.Writer, conn net.Conn, p []byte) error {
	_ = conn.SetWriteDeadline(time.Now().Add(stuckTime))
	_, err := w.Write(p)
	return err
}

// Close implements io.Closer; fasthttp calls it whatever became of the answer.
func (b *streamBody) Close() error {
	var err error
	if b.closer != nil {
		err = b.closer.Close()
	}
	b.call.release()
	return err
}
