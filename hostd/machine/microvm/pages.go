package microvm

import (
	"bufio"
	"bytes"
	"encoding/binary"
	"fmt"
	"io"
	"iter"
	"os"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/berth-dev/berth/hostd/machine"
)

// Bits of an entry of /proc/PID/pagemap (kernel, Documentation/admin-guide/mm/pagemap.rst).
const (
	pagePresent = 1 << 63
	pageSwapped = 1 << 62
	pageOfFile  = 1 << 61 // a page of the mapped file: not copied on write
)

// ram is the guest's memory inside its process: a private mapping of the
// template's memory file.
type ram struct {
	pid   int
	start uint64 // address of the mapping
	size  int64  // bytes
}

// ramName is what a template's memory file is called in /proc/PID/maps.
const ramName = "berth-template"

// findRAM looks for the mapping in the process's memory map.
func findRAM(pid int, size int64) (ram, error) {
	maps, err := os.Open(fmt.Sprintf("/proc/%d/maps", pid))
	if err != nil {
		return ram{}, err
	}
	defer maps.Close()
	for lines := bufio.NewScanner(maps); lines.Scan(); {
		start, end, ok := parseMapping(lines.Text())
		if ok && int64(end-start) == size {
			return ram{pid, start, size}, nil
		}
	}
	return ram{}, fmt.Errorf("process %d has no mapping of its template's memory", pid)
}

// parseMapping reads a line of maps (proc(5)) if it is of a memory file of ours.
func parseMapping(line string) (start, end uint64, ok bool) {
	fields := strings.Fields(line)
	if len(fields) < 6 || fields[5] != "/memfd:"+ramName {
		return 0, 0, false
	}
	from, to, ok := strings.Cut(fields[0], "-")
	start, err1 := strconv.ParseUint(from, 16, 64)
	end, err2 := strconv.ParseUint(to, 16, 64)
	return start, end, ok && err1 == nil && err2 == nil && end > start
}

// mapRAM maps a memory file to compare with.
func mapRAM(f *os.File, size int64) ([]byte, error) {
	data, err := unix.Mmap(int(f.Fd()), 0, int(size), unix.PROT_READ, unix.MAP_SHARED)
	if err != nil {
		return nil, fmt.Errorf("map template: %w", err)
	}
	return data, nil
}

// Pages are read in runs of at most so many, and their entries in batches.
const (
	runPages   = 64
	batchPages = 64 << 10
)

// delta yields the pages that the guest has changed from the template: those
// copied on write whose content differs. The machine stands still.
func (r ram) delta(template []byte) iter.Seq2[machine.Page, error] {
	return func(yield func(machine.Page, error) bool) {
		if err := r.eachDelta(template, func(p machine.Page) bool { return yield(p, nil) }); err != nil {
			yield(machine.Page{}, err)
		}
	}
}

// eachDelta calls f with each page until it returns false.
func (r ram) eachDelta(template []byte, f func(machine.Page) bool) error {
	mem, err := os.Open(fmt.Sprintf("/proc/%d/mem", r.pid))
	if err != nil {
		return err
	}
	defer mem.Close()
	pagemap, err := os.Open(fmt.Sprintf("/proc/%d/pagemap", r.pid))
	if err != nil {
		return err
	}
	defer pagemap.Close()
	entries, buf := make([]byte, 8*batchPages), make([]byte, runPages*machine.PageSize)
	for at, pages := int64(0), r.size/machine.PageSize; at < pages; at += batchPages {
		batch := entries[:8*min(batchPages, pages-at)]
		if _, err := pagemap.ReadAt(batch, int64(r.start/machine.PageSize+uint64(at))*8); err != nil {
			return fmt.Errorf("read pagemap: %w", err)
		}
		for first, n := range runs(batch) {
			more, err := r.compare(mem, template, at+int64(first), buf[:n*machine.PageSize], f)
			if err != nil || !more {
				return err
			}
		}
	}
	return nil
}

// runs yields first index and length of runs of pages that are the process's own.
func runs(entries []byte) iter.Seq2[int, int] {
	own := func(i int) bool {
		e := binary.NativeEndian.Uint64(entries[8*i:])
		return e&(pagePresent|pageSwapped) != 0 && e&pageOfFile == 0
	}
	return func(yield func(int, int) bool) {
		for i, total := 0, len(entries)/8; i < total; {
			n := 0
			for n < runPages && i+n < total && own(i+n) {
				n++
			}
			if n > 0 && !yield(i, n) {
				return
			}
			i += max(n, 1)
		}
	}
}

// compare fills data with pages of the process and passes on those that differ.
func (r ram) compare(mem io.ReaderAt, template []byte, first int64, data []byte, f func(machine.Page) bool) (more bool, err error) {
	if _, err := mem.ReadAt(data, int64(r.start)+first*machine.PageSize); err != nil {
		return false, fmt.Errorf("read guest memory: %w", err)
	}
	for i := range len(data) / machine.PageSize {
		page := data[i*machine.PageSize:][:machine.PageSize]
		at := (first + int64(i)) * machine.PageSize
		if bytes.Equal(page, template[at:at+machine.PageSize]) {
			continue
		}
		p := machine.Page{Index: uint64(first) + uint64(i), Data: page}
		if isZero(page) {
			p.Data = nil
		}
		if !f(p) {
			return false, nil
		}
	}
	return true, nil
}

// writePages is how many pages one call puts into a process.
const writePages = 256

// write puts pages into the memory of a process whose guest has not run yet. By
// process_vm_writev(2), which copies once, where /proc/PID/mem would twice and
// page by page.
func (r ram) write(pages iter.Seq2[machine.Page, error]) error {
	w := pageWriter{ram: r, data: make([]byte, 0, writePages*machine.PageSize)}
	next, last := uint64(0), uint64(r.size/machine.PageSize)
	for p, err := range pages {
		switch {
		case err != nil:
			return err
		case p.Index < next || p.Index >= last:
			return fmt.Errorf("page %d is out of place", p.Index)
		case p.Data != nil && len(p.Data) != machine.PageSize:
			return fmt.Errorf("page %d has %d bytes", p.Index, len(p.Data))
		}
		if err := w.add(p); err != nil {
			return err
		}
		next = p.Index + 1
	}
	return w.flush()
}

// pageWriter collects pages for a call.
type pageWriter struct {
	ram  ram
	data []byte
	to   []unix.RemoteIovec // where data goes, in runs
}

func (w *pageWriter) add(p machine.Page) error {
	if len(w.data) == cap(w.data) {
		if err := w.flush(); err != nil {
			return err
		}
	}
	if p.Data == nil {
		p.Data = zeros[:machine.PageSize]
	}
	w.data = append(w.data, p.Data...)
	at := uintptr(w.ram.start + p.Index*machine.PageSize)
	if n := len(w.to); n > 0 && w.to[n-1].Base+uintptr(w.to[n-1].Len) == at {
		w.to[n-1].Len += machine.PageSize
	} else {
		w.to = append(w.to, unix.RemoteIovec{Base: at, Len: machine.PageSize})
	}
	return nil
}

func (w *pageWriter) flush() error {
	if len(w.data) == 0 {
		return nil
	}
	from := []unix.Iovec{{Base: &w.data[0], Len: uint64(len(w.data))}}
	n, err := unix.ProcessVMWritev(w.ram.pid, from, w.to, 0)
	if err == nil && n < len(w.data) {
		err = io.ErrShortWrite
	}
	if err != nil {
		return fmt.Errorf("write guest memory: %w", err)
	}
	w.data, w.to = w.data[:0], w.to[:0]
	return nil
}
