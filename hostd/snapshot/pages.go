package snapshot

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"io"
	"slices"
	"sync"

	"github.com/berth-dev/berth/hostd/machine"
)

// maxPacks is how many packs the pages of one snapshot may lie in: each costs a
// reader a few MiB.
const maxPacks = 12

// batch is up to chunkPages pages of a capture on their way into a pack.
type batch struct {
	index []uint64
	data  []byte   // machine.PageSize bytes for each index
	old   []record // what the previous snapshot had at index; slot zeroSlot: nothing

	records []record // what the table is to say
	plain   []byte
	packed  []byte
	frame   []byte
}

// batches are waiting to be used again, as large as they were needed.
var batches = sync.Pool{New: func() any { return &batch{} }}

func newBatch() *batch {
	b := batches.Get().(*batch)
	b.index, b.data, b.old, b.records = b.index[:0], b.data[:0], b.old[:0], b.records[:0]
	return b
}

var zeros [machine.PageSize]byte

// add copies a page in.
func (b *batch) add(p machine.Page, old record) {
	b.index = append(b.index, p.Index)
	b.old = append(b.old, old)
	if p.Data == nil {
		b.data = append(b.data, zeros[:]...)
	} else {
		b.data = append(b.data, p.Data...)
	}
}

// seal decides for each page whether it is zeros, the same as before, or to be
// stored in slot, and makes a chunk of the latter.
func (b *batch) seal(s seal, n uint64, slot byte) {
	count := 0
	b.plain = append(room(b.plain, 2+len(b.index)*(8+machine.PageSize)), 0, 0)
	for i, index := range b.index {
		r := b.judge(i, slot)
		if r.slot == slot {
			b.plain = binary.BigEndian.AppendUint64(b.plain, index)
			count++
		}
		b.records = append(b.records, r)
	}
	binary.BigEndian.PutUint16(b.plain, uint16(count))
	for i, r := range b.records {
		if r.slot == slot {
			b.plain = append(b.plain, b.page(i)...)
		}
	}
	b.frame, b.packed = s.frame(b.frame, b.packed, b.plain, n, false)
}

func (b *batch) judge(i int, slot byte) record {
	if bytes.Equal(b.page(i), zeros[:]) {
		return record{index: b.index[i], slot: zeroSlot}
	}
	h := hashPage(b.page(i))
	if b.old[i].slot != zeroSlot && b.old[i].hash == h {
		return b.old[i]
	}
	return record{b.index[i], slot, h}
}

func (b *batch) page(i int) []byte { return b.data[i*machine.PageSize:][:machine.PageSize] }

// pageWriter seals batches side by side and hands their records on in order.
type pageWriter struct {
	to    *packWriter
	slot  byte
	told  func(record) error
	win   window[*batch]
	cur   *batch
	count uint64 // pages stored
}

func newPageWriter(to *packWriter, slot byte, told func(record) error) *pageWriter {
	return &pageWriter{to: to, slot: slot, told: told, win: window[*batch]{depth: depth}}
}

func (w *pageWriter) add(p machine.Page, old record) error {
	if w.cur == nil {
		w.cur = newBatch()
	}
	w.cur.add(p, old)
	if len(w.cur.index) < chunkPages {
		return nil
	}
	return w.push()
}

func (w *pageWriter) push() error {
	if w.win.full() {
		if err := w.pop(); err != nil {
			return err
		}
	}
	b, n := w.cur, w.to.number()
	w.cur = nil
	w.win.push(func() *batch {
		b.seal(w.to.seal, n, w.slot)
		return b
	})
	return nil
}

func (w *pageWriter) pop() error {
	b := w.win.pop()
	defer batches.Put(b)
	for _, r := range b.records {
		if r.slot == w.slot {
			w.count++
		}
		if err := w.told(r); err != nil {
			return err
		}
	}
	return w.to.append(b.frame)
}

func (w *pageWriter) flush() error {
	if w.cur != nil {
		if err := w.push(); err != nil {
			return err
		}
	}
	for !w.win.empty() {
		if err := w.pop(); err != nil {
			return err
		}
	}
	return nil
}

func (w *pageWriter) close() { w.win.drain() }

// pages stores the pages and their table.
//
// The table names packs by slot: 0 is this snapshot's own, the others are those
// of the previous one. When less than half of what an old pack holds is still
// needed, its pages are stored again in a new pack that takes over its slot.
func (w *writing) pages(c machine.Capture) error {
	slots, renumber := w.oldSlots()
	old, err := w.oldTable(renumber)
	if err != nil {
		return err
	}
	defer old.close()
	own, err := w.newPack(kindPages)
	if err != nil {
		return err
	}
	used := make([]uint64, len(slots))
	table, err := w.firstPass(c, own, old, used)
	if err != nil {
		return err
	}
	slots[0] = slot{own.name, used[0]}
	again := worthStoringAgain(slots, used)
	if err := w.storeAgain(c, table, slots, used, again); err != nil {
		return err
	}
	return w.settle(own, slots, used)
}

// oldSlots gives room for the own slot, then the previous snapshot's packs, and
// what its slots are called here.
func (w *writing) oldSlots() (slots []slot, renumber []byte) {
	slots = make([]slot, 1)
	if w.prev == nil {
		return slots, nil
	}
	at := map[string]byte{}
	for _, s := range w.prev.Slots {
		if _, seen := at[s.Pack]; !seen && s.Pack != "" {
			at[s.Pack] = byte(len(slots))
			slots = append(slots, s)
		}
		renumber = append(renumber, at[s.Pack])
	}
	return slots, renumber
}

// firstPass stores what changed and writes the table; used counts pages by slot.
func (w *writing) firstPass(c machine.Capture, own *packWriter, old *oldTable, used []uint64) (*packWriter, error) {
	table, err := w.newPack(kindTable)
	if err != nil {
		return nil, err
	}
	chunks := newChunker(table)
	defer chunks.close()
	records := &tableWriter{to: chunks}
	pages := newPageWriter(own, 0, func(r record) error {
		if r.slot != zeroSlot {
			used[r.slot]++
		}
		return records.add(r)
	})
	defer pages.close()
	if err := w.each(c, func(p machine.Page) error { return pages.add(p, old.at(p.Index)) }); err != nil {
		return nil, err
	}
	if err := errors.Join(pages.flush(), chunks.flush()); err != nil {
		return nil, err
	}
	w.header.Pages, w.contents.Table = records.count, table.name
	return table, w.keep(table)
}

// each walks over a capture's pages and checks that it keeps its promises.
func (w *writing) each(c machine.Capture, do func(machine.Page) error) error {
	next := uint64(0)
	for p, err := range c.Pages() {
		switch {
		case err != nil:
			return err
		case p.Index < next || p.Index > maxIndex:
			return errors.New("the machine's pages come out of order")
		case p.Data != nil && len(p.Data) != machine.PageSize:
			return errors.New("a page of the machine has another size")
		case w.ctx.Err() != nil:
			return context.Cause(w.ctx)
		}
		if err := do(p); err != nil {
			return err
		}
		next = p.Index + 1
	}
	return nil
}

// worthStoringAgain picks the slots of old packs whose pages should be stored
// anew: less than half of the pack is needed, or there are too many packs.
func worthStoringAgain(slots []slot, used []uint64) []byte {
	var again, fine []byte
	for i := 1; i < len(slots); i++ {
		switch {
		case used[i] == 0:
		case used[i]*2 < slots[i].Stored:
			again = append(again, byte(i))
		default:
			fine = append(fine, byte(i))
		}
	}
	if len(fine)+2 > maxPacks { // with the own pack and one of what is stored again
		slices.SortFunc(fine, func(a, b byte) int { return int(min(used[a], 1<<40)) - int(min(used[b], 1<<40)) })
		again = append(again, fine[:len(fine)-maxPacks/2]...)
	}
	return again
}

// storeAgain makes one new pack of the pages in the slots again.
func (w *writing) storeAgain(c machine.Capture, table *packWriter, slots []slot, used []uint64, again []byte) error {
	if len(again) == 0 {
		return nil
	}
	p, err := w.newPack(kindPages)
	if err != nil {
		return err
	}
	moved, err := w.secondPass(c, table, p, again)
	if err != nil {
		return err
	}
	want := uint64(0)
	for _, i := range again {
		want += used[i]
		slots[i] = slot{p.name, moved}
	}
	if moved != want {
		return errors.New("the machine's pages changed while they were read")
	}
	return w.keep(p)
}

// secondPass reads the pages once more, beside the table, and stores those of
// the slots again in p.
func (w *writing) secondPass(c machine.Capture, table, p *packWriter, again []byte) (moved uint64, err error) {
	records, err := w.openTable(table.f.f, table.size, table.name)
	if err != nil {
		return 0, err
	}
	defer records.close()
	var expect []pageHash // of the pages in pages, oldest first
	pages := newPageWriter(p, 0, func(r record) error {
		if r.slot != 0 || r.hash != expect[0] {
			return errors.New("the machine's pages changed while they were read")
		}
		expect = expect[1:]
		return nil
	})
	defer pages.close()
	err = w.each(c, func(page machine.Page) error {
		r, err := records.next()
		if err != nil || r.index != page.Index {
			return errors.Join(errors.New("the machine's pages changed while they were read"), err)
		}
		if r.slot == zeroSlot || !slices.Contains(again, r.slot) {
			return nil
		}
		expect = append(expect, r.hash)
		return pages.add(page, record{slot: zeroSlot})
	})
	if err := errors.Join(err, pages.flush()); err != nil {
		return 0, err
	}
	return pages.count, nil
}

// settle says in the manifest which packs the slots are.
func (w *writing) settle(own *packWriter, slots []slot, used []uint64) error {
	for i := range slots {
		if used[i] == 0 {
			slots[i] = slot{}
		} else if w.prev != nil && w.prev.packs[slots[i].Pack].Name != "" {
			w.refer(w.prev.packs[slots[i].Pack])
		}
	}
	w.contents.Slots = slots
	if used[0] == 0 { // nothing new: the pack goes when the writing closes
		return nil
	}
	return w.keep(own)
}

// oldTable looks pages of the previous snapshot up by rising index.
type oldTable struct {
	w        *writing
	records  *tableReader // nil: nothing more to be found
	cur      record
	renumber []byte
	f        io.Closer
}

func (w *writing) oldTable(renumber []byte) (*oldTable, error) {
	t := &oldTable{w: w, renumber: renumber}
	if w.prev == nil || w.prev.Table == "" {
		return t, nil
	}
	f, err := w.s.openPackFile(w.prev.packs[w.prev.Table])
	if err != nil {
		return nil, err
	}
	t.f = f
	if t.records, err = w.openTable(f, w.prev.packs[w.prev.Table].Size, w.prev.Table); err != nil {
		return nil, errors.Join(err, f.Close())
	}
	t.advance()
	return t, nil
}

func (w *writing) openTable(r io.ReaderAt, size int64, name string) (*tableReader, error) {
	p, err := openPack(r, size, w.order.Key, w.order.SessionID, kindTable, name, 2)
	if err != nil {
		return nil, err
	}
	return newTableReader(newStreamReader(p, -1, nil)), nil
}

// advance goes to the next record. After an error the rest is taken as unknown.
func (t *oldTable) advance() {
	var err error
	if t.cur, err = t.records.next(); err == nil {
		return
	}
	if err != io.EOF {
		t.w.s.log.Warn("the previous snapshot cannot be read to its end", "snapshot", t.w.order.Previous, "error", err)
	}
	t.stop()
}

func (t *oldTable) stop() {
	_ = t.records.close() // reading only
	t.records = nil
}

// at gives the record of a page as the new table would have it; zeroSlot: none.
func (t *oldTable) at(index uint64) record {
	for t.records != nil && t.cur.index < index {
		t.advance()
	}
	if t.records == nil || t.cur.index != index || int(t.cur.slot) >= len(t.renumber) || t.renumber[t.cur.slot] == 0 {
		return record{slot: zeroSlot}
	}
	r := t.cur
	r.slot = t.renumber[r.slot]
	return r
}

func (t *oldTable) close() {
	if t.records != nil {
		t.stop()
	}
	if t.f != nil {
		_ = t.f.Close() // reading only
	}
}
