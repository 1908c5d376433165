package snapshot

import (
	"bufio"
	"encoding/binary"
	"io"
)

// record is what a table says of one page.
type record struct {
	index uint64
	slot  byte // zeroSlot: zeros, without a hash
	hash  pageHash
}

// tableWriter writes records, which must come by rising index.
type tableWriter struct {
	to    io.Writer
	last  uint64
	count int64
	buf   []byte
}

func (t *tableWriter) add(r record) error {
	t.buf = binary.AppendUvarint(t.buf[:0], r.index-t.last)
	t.buf = append(t.buf, r.slot)
	if r.slot != zeroSlot {
		t.buf = append(t.buf, r.hash[:]...)
	}
	t.last = r.index
	t.count++
	_, err := t.to.Write(t.buf)
	return err
}

// tableReader gives the records back.
type tableReader struct {
	from  *bufio.Reader
	close func() error
	last  uint64
	count int64
	hash  pageHash // of the record being read; here so that it is not allocated each time
}

func newTableReader(s io.ReadCloser) *tableReader {
	return &tableReader{from: bufio.NewReaderSize(s, 64<<10), close: s.Close}
}

// next gives the next record, io.EOF after the last.
func (t *tableReader) next() (r record, err error) {
	delta, err := binary.ReadUvarint(t.from)
	if err == io.EOF {
		return r, err
	}
	if err != nil {
		return r, tableError(err)
	}
	if t.count > 0 && delta == 0 || delta > maxIndex || t.last+delta > maxIndex {
		return r, refuse(Damaged, "the table of pages is out of order")
	}
	r.index = t.last + delta
	if r.slot, err = t.from.ReadByte(); err != nil {
		return r, tableError(err)
	}
	if r.slot != zeroSlot {
		if _, err := io.ReadFull(t.from, t.hash[:]); err != nil {
			return r, tableError(err)
		}
		r.hash = t.hash
	}
	t.last = r.index
	t.count++
	return r, nil
}

// tableError keeps refusals of the layers below and names its own.
func tableError(err error) error {
	if err == io.EOF || err == io.ErrUnexpectedEOF {
		return refuse(Truncated, "the table of pages ends in a record")
	}
	if _, ok := err.(*Refused); ok {
		return err
	}
	return refuse(Damaged, "the table of pages: %v", err)
}
