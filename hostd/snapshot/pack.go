package snapshot

import (
	"crypto/cipher"
	"crypto/rand"
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"fmt"
	"hash"
	"sync"

	"github.com/klauspost/compress/zstd"
)

// The fastest level halves memory pages at several hundred MB/s a core; better
// ones would make the pause longer for a tenth less.
var encoder = sync.OnceValue(func() *zstd.Encoder {
	e, err := zstd.NewWriter(nil, zstd.WithEncoderLevel(zstd.SpeedFastest), zstd.WithEncoderCRC(false),
		zstd.WithWindowSize(1<<20), zstd.WithEncoderConcurrency(depth))
	if err != nil {
		panic(err) // the options above are constants
	}
	return e
})

var decoder = sync.OnceValue(func() *zstd.Decoder {
	d, err := zstd.NewReader(nil, zstd.WithDecoderConcurrency(depth), zstd.WithDecodeAllCapLimit(true), zstd.WithDecoderMaxMemory(maxPlain))
	if err != nil {
		panic(err) // the options above are constants
	}
	return d
})

// depth is how many chunks are worked on at once by one reader or writer.
const depth = 4

// seal is what encrypts and decrypts one pack's chunks. Its methods may be
// called at once.
type seal struct {
	aead cipher.AEAD
	head []byte
}

func newSeal(key Key, sessionID string, k kind, name [nameSize]byte) (seal, error) {
	aead, err := derive(key, name[:], fmt.Sprintf("pack %d\x00%s", k, sessionID))
	head := append([]byte(packMagic), version, byte(k), 0, 0, 0, 0, 0, 0, 0)
	return seal{aead, append(head, name[:]...)}, err
}

func nonce(n uint64, last bool) []byte {
	b := binary.BigEndian.AppendUint64(make([]byte, 0, 12), n)
	if last {
		return append(b, 1, 0, 0, 0)
	}
	return append(b, 0, 0, 0, 0)
}

// frame makes chunk n as it stands in the file; scratch and dst are reused.
func (s seal) frame(dst, scratch, plain []byte, n uint64, last bool) (frame, used []byte) {
	used = encoder().EncodeAll(plain, room(scratch, len(plain)))
	dst = binary.BigEndian.AppendUint32(room(dst, 4+len(used)+tagSize), uint32(len(used)+tagSize))
	return s.aead.Seal(dst, nonce(n, last), used, s.head), used
}

// open undoes frame without its length. The result is in dst's memory if that is
// large enough; sealed is overwritten.
func (s seal) open(dst, sealed []byte, n uint64, last bool) ([]byte, error) {
	packed, err := s.aead.Open(sealed[:0], nonce(n, last), sealed, s.head)
	if err != nil {
		return nil, refuse(Damaged, "chunk %d was altered, is out of place or sealed with another key", n)
	}
	plain, err := decoder().DecodeAll(packed, room(dst, plainSize(packed)))
	if err != nil {
		return nil, refuse(Damaged, "chunk %d: %v", n, err)
	}
	return plain, nil
}

// room is buf, empty, or another one if it has no room for n bytes. Unlike
// append it leaves no smaller ones behind.
func room(buf []byte, n int) []byte {
	if cap(buf) < n {
		return make([]byte, 0, n)
	}
	return buf[:0]
}

// plainSize is how much room the decoder gets; it refuses what needs more.
func plainSize(packed []byte) int {
	if len(packed) == 0 { // what the encoder makes of nothing: the last chunk
		return 0
	}
	var h zstd.Header
	if h.Decode(packed) != nil || !h.HasFCS || h.FrameContentSize > maxPlain {
		return maxPlain
	}
	return int(h.FrameContentSize)
}

// packWriter writes one pack. One goroutine owns it; seal may be used beside.
type packWriter struct {
	seal
	name string
	f    *file
	sum  hash.Hash
	size int64
	next uint64 // number of the next chunk

	synced bool // for good: nothing more is written
}

// newPack begins a pack at path(name).
func newPack(fs files, path func(name string) string, key Key, sessionID string, k kind) (*packWriter, error) {
	var name [nameSize]byte
	if _, err := rand.Read(name[:]); err != nil {
		return nil, err
	}
	s, err := newSeal(key, sessionID, k, name)
	if err != nil {
		return nil, err
	}
	p := &packWriter{seal: s, name: hex.EncodeToString(name[:]), sum: sha256.New()}
	if p.f, err = fs.create(path(p.name)); err != nil {
		return nil, err
	}
	return p, p.append(s.head)
}

// number reserves the next chunk's number.
func (p *packWriter) number() uint64 {
	p.next++
	return p.next - 1
}

// append writes the next bytes of the file.
func (p *packWriter) append(b []byte) error {
	if _, err := p.f.Write(b); err != nil {
		return err
	}
	p.sum.Write(b)
	p.size += int64(len(b))
	return nil
}

// finish writes the last chunk. The file is not synced and stays open.
func (p *packWriter) finish() (pack, error) {
	last, _ := p.frame(nil, nil, nil, p.number(), true)
	err := p.append(last)
	return pack{p.name, p.size, p.sum.Sum(nil)}, err
}

// chunker cuts a stream into chunks of a pack and seals them side by side.
type chunker struct {
	to   *packWriter
	win  window[*streamChunk]
	cur  *streamChunk
	free []*streamChunk
}

type streamChunk struct{ plain, packed, frame []byte }

func newChunker(to *packWriter) *chunker {
	return &chunker{to: to, win: window[*streamChunk]{depth: depth}}
}

func (c *chunker) Write(p []byte) (int, error) {
	total := len(p)
	for len(p) > 0 {
		if c.cur == nil {
			c.cur = c.blank()
		}
		n := min(len(p), chunkBytes-len(c.cur.plain))
		c.cur.plain = append(c.cur.plain, p[:n]...)
		p = p[n:]
		if len(c.cur.plain) == chunkBytes {
			if err := c.push(); err != nil {
				return total - len(p), err
			}
		}
	}
	return total, nil
}

func (c *chunker) blank() *streamChunk {
	if n := len(c.free); n > 0 {
		last := c.free[n-1]
		c.free = c.free[:n-1]
		last.plain = last.plain[:0]
		return last
	}
	return &streamChunk{}
}

func (c *chunker) push() error {
	if c.win.full() {
		if err := c.pop(); err != nil {
			return err
		}
	}
	cur, n := c.cur, c.to.number()
	c.cur = nil
	c.win.push(func() *streamChunk {
		cur.frame, cur.packed = c.to.frame(cur.frame, cur.packed, cur.plain, n, false)
		return cur
	})
	return nil
}

func (c *chunker) pop() error {
	done := c.win.pop()
	c.free = append(c.free, done)
	return c.to.append(done.frame)
}

// flush seals what is left and writes everything. After an error close it.
func (c *chunker) flush() error {
	if c.cur != nil {
		if err := c.push(); err != nil {
			return err
		}
	}
	for !c.win.empty() {
		if err := c.pop(); err != nil {
			return err
		}
	}
	return nil
}

// close waits for what is under way.
func (c *chunker) close() { c.win.drain() }
