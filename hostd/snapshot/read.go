package snapshot

import (
	"encoding/binary"
	"io"
	"sync"

	"github.com/berth-dev/berth/hostd/machine"
)

// chunk is one that was read: plain, and for pages what it holds.
type chunk struct {
	sealed []byte
	plain  []byte
	err    error

	index []uint64
	hash  []pageHash
	data  []byte // the pages, one after the other
}

// packReader gives the chunks of a pack in order; it reads ahead and unseals
// side by side. One goroutine owns it and must close it.
type packReader struct {
	seal
	kind kind
	r    io.ReaderAt
	size int64
	off  int64
	n    uint64
	win  window[*chunk]
	err  error // why reading ahead ended
}

// openPack begins to read the pack of that name and size.
func openPack(r io.ReaderAt, size int64, key Key, sessionID string, k kind, name string, ahead int) (*packReader, error) {
	raw, err := packName(name)
	if err != nil {
		return nil, refuse(Damaged, "%v", err)
	}
	s, err := newSeal(key, sessionID, k, raw)
	if err != nil {
		return nil, err
	}
	if err := checkHead(r, s.head, name); err != nil {
		return nil, err
	}
	return &packReader{seal: s, kind: k, r: r, size: size, off: packHeader, win: window[*chunk]{depth: ahead}}, nil
}

// checkHead compares the first bytes of a pack with what they must be.
func checkHead(r io.ReaderAt, want []byte, name string) error {
	got := make([]byte, packHeader)
	if _, err := r.ReadAt(got, 0); err != nil {
		return short(err, "pack "+name)
	}
	const at = len(packMagic)
	switch {
	case string(got[:at]) == packMagic && got[at] != version:
		return refuse(Version, "pack %s of version %d, this host reads %d", name, got[at], version)
	case string(got) != string(want):
		return refuse(Foreign, "the file of pack %s holds something else", name)
	}
	return nil
}

// short turns the end of a file into its refusal.
func short(err error, what string) error {
	if err == io.EOF || err == io.ErrUnexpectedEOF {
		return refuse(Truncated, "%s ends too early", what)
	}
	return err
}

// next gives the next chunk, io.EOF after the last. It is the caller's until
// given back with release.
func (p *packReader) next() (*chunk, error) {
	for !p.win.full() && p.err == nil {
		p.ahead()
	}
	if p.win.empty() {
		return nil, p.err
	}
	c := p.win.pop()
	if c.err != nil {
		p.win.drain()
		p.err = c.err
		return nil, c.err
	}
	return c, nil
}

// ahead reads one frame and has it unsealed.
func (p *packReader) ahead() {
	c, last, err := p.readFrame()
	if err != nil {
		p.err = err
		return
	}
	n := p.n
	p.n++
	if last {
		p.err = io.EOF
		if plain, err := p.open(c.plain, c.sealed, n, true); err != nil {
			p.err = err
		} else if len(plain) != 0 {
			p.err = refuse(Damaged, "the last chunk is not empty")
		}
		p.release(c)
		return
	}
	p.win.push(func() *chunk {
		if c.plain, c.err = p.open(c.plain, c.sealed, n, false); c.err == nil && p.kind == kindPages {
			c.err = c.pages()
		}
		return c
	})
}

func (p *packReader) readFrame() (c *chunk, last bool, err error) {
	var length [4]byte
	if p.size-p.off < 4 {
		return nil, false, refuse(Truncated, "pack ends before its last chunk")
	}
	if _, err := p.r.ReadAt(length[:], p.off); err != nil {
		return nil, false, short(err, "pack")
	}
	n := int64(binary.BigEndian.Uint32(length[:]))
	if n < tagSize || n > maxFrame {
		return nil, false, refuse(Damaged, "chunk %d has %d bytes", p.n, n)
	}
	if p.off+4+n > p.size {
		return nil, false, refuse(Truncated, "pack ends in chunk %d", p.n)
	}
	c = chunks.Get().(*chunk)
	c.sealed = room(c.sealed, int(n))[:n]
	if _, err := p.r.ReadAt(c.sealed, p.off+4); err != nil {
		return nil, false, short(err, "pack")
	}
	p.off += 4 + n
	return c, p.off == p.size, nil
}

// chunks are waiting to be used again, as large as they were needed.
var chunks = sync.Pool{New: func() any { return &chunk{} }}

func (p *packReader) release(c *chunk) { chunks.Put(c) }

func (p *packReader) close() { p.win.drain() }

// pages reads a chunk of a pages pack and hashes what it holds.
func (c *chunk) pages() error {
	if len(c.plain) < 2 {
		return refuse(Damaged, "chunk of pages has %d bytes", len(c.plain))
	}
	count := int(binary.BigEndian.Uint16(c.plain))
	if count > chunkPages || len(c.plain) != 2+count*(8+machine.PageSize) {
		return refuse(Damaged, "chunk of %d pages has %d bytes", count, len(c.plain))
	}
	c.index, c.hash, c.data = c.index[:0], c.hash[:0], c.plain[2+8*count:]
	for i := range count {
		index := binary.BigEndian.Uint64(c.plain[2+8*i:])
		if i > 0 && index <= c.index[i-1] {
			return refuse(Damaged, "pages are out of order")
		}
		c.index = append(c.index, index)
		c.hash = append(c.hash, hashPage(c.page(i)))
	}
	return nil
}

func (c *chunk) page(i int) []byte { return c.data[i*machine.PageSize:][:machine.PageSize] }

// streamReader is a stream pack as it was written, which must be size bytes
// long; a negative size is not checked.
type streamReader struct {
	p     *packReader
	cur   *chunk
	rest  []byte
	left  int64
	sized bool
	done  func() error // called once by Close; may be nil
}

func newStreamReader(p *packReader, size int64, done func() error) *streamReader {
	return &streamReader{p: p, left: size, sized: size >= 0, done: done}
}

func (s *streamReader) Read(b []byte) (int, error) {
	for len(s.rest) == 0 {
		if err := s.advance(); err != nil {
			return 0, err
		}
	}
	n := copy(b, s.rest)
	s.rest = s.rest[n:]
	return n, nil
}

func (s *streamReader) advance() error {
	s.drop()
	c, err := s.p.next()
	if err == io.EOF && s.sized && s.left != 0 {
		return refuse(Truncated, "a stream is %d bytes shorter than it was", s.left)
	}
	if err != nil {
		return err
	}
	s.cur, s.rest = c, c.plain
	if s.left -= int64(len(c.plain)); s.sized && s.left < 0 {
		return refuse(Damaged, "a stream is longer than it was")
	}
	return nil
}

func (s *streamReader) drop() {
	if s.cur != nil {
		s.p.release(s.cur)
		s.cur, s.rest = nil, nil
	}
}

// Close ends reading, at the end or before.
func (s *streamReader) Close() error {
	s.drop()
	s.p.close()
	if s.done == nil {
		return nil
	}
	done := s.done
	s.done = nil
	return done()
}
