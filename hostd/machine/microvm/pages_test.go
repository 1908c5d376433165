package microvm

import (
	"bytes"
	"iter"
	"maps"
	"math/rand/v2"
	"os"
	"slices"
	"testing"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/berth-dev/berth/hostd/machine"
)

// fakeRAM is a template's memory, sealed, and a private mapping of it in this
// process in the place of a guest's.
func fakeRAM(t *testing.T, pages int) (template []byte, guest []byte, r ram) {
	t.Helper()
	fd, err := unix.MemfdCreate(ramName, unix.MFD_ALLOW_SEALING|unix.MFD_CLOEXEC)
	if err != nil {
		t.Fatal(err)
	}
	f := os.NewFile(uintptr(fd), ramName)
	t.Cleanup(func() { f.Close() })
	size := int64(pages * machine.PageSize)
	if err := f.Truncate(size); err != nil {
		t.Fatal(err)
	}
	for i := 0; i < pages; i += 3 { // two of three pages are holes
		if _, err := f.WriteAt(bytes.Repeat([]byte{byte(i%250 + 1)}, machine.PageSize), int64(i*machine.PageSize)); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := unix.FcntlInt(f.Fd(), unix.F_ADD_SEALS, allSeals); err != nil {
		t.Fatal(err)
	}
	if template, err = mapRAM(f, size); err != nil {
		t.Fatal(err)
	}
	if guest, err = unix.Mmap(fd, 0, int(size), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = unix.Munmap(template); _ = unix.Munmap(guest) })
	return template, guest, ram{os.Getpid(), uint64(uintptr(unsafe.Pointer(&guest[0]))), size}
}

func collect(t *testing.T, pages iter.Seq2[machine.Page, error]) map[uint64][]byte {
	t.Helper()
	got, next := map[uint64][]byte{}, uint64(0)
	for p, err := range pages {
		if err != nil {
			t.Fatal(err)
		}
		if p.Index < next {
			t.Fatalf("page %d after %d", p.Index, next)
		}
		next = p.Index + 1
		got[p.Index] = bytes.Clone(p.Data)
	}
	return got
}

func TestDelta(t *testing.T) {
	const pages = 3*batchPages/2 + 5
	template, guest, r := fakeRAM(t, pages)
	page := func(i int) []byte { return guest[i*machine.PageSize:][:machine.PageSize] }
	sum := 0
	for i := 0; i < 3000; i++ { // reading copies nothing
		sum += int(page(i)[0])
	}
	if got := collect(t, r.delta(template)); len(got) != 0 || sum == 0 {
		t.Fatalf("%d pages differ before anything was written", len(got))
	}
	want := map[uint64][]byte{}
	for _, i := range []int{0, 1, 2, 63, 64, 65, 1000, batchPages - 1, batchPages, pages - 1} {
		page(i)[i%machine.PageSize] = 0xee
		want[uint64(i)] = bytes.Clone(page(i))
	}
	clear(page(300)) // 300 is not a hole
	want[300] = nil
	copy(page(600), bytes.Clone(page(600))) // copied on write, the same
	page(601)[5] = 0
	got := collect(t, r.delta(template))
	if !maps.EqualFunc(got, want, bytes.Equal) {
		t.Errorf("got pages %v, want %v", slices.Sorted(maps.Keys(got)), slices.Sorted(maps.Keys(want)))
	}
	for range r.delta(template) { // a reader may leave
		break
	}
}

func TestDeltaGoesBackIn(t *testing.T) {
	const pages = 5000
	template, guest, r := fakeRAM(t, pages)
	for range 900 {
		i := rand.IntN(pages)
		switch at := guest[i*machine.PageSize:][:machine.PageSize]; rand.IntN(3) {
		case 0:
			clear(at)
		default:
			at[rand.IntN(len(at))]++
		}
	}
	_, other, into := fakeRAM(t, pages)
	if err := into.write(r.delta(template)); err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(guest, other) {
		t.Error("memory differs after its delta was written to a clone")
	}
}

func TestParseMapping(t *testing.T) {
	for line, want := range map[string]bool{
		"7f00-9f00 rw-p 00000000 00:01 1029 /memfd:berth-template (deleted)": true,
		"7f00-9f00 rw-p 00000000 00:01 1029 /memfd:other (deleted)":          false,
		"7f00-9f00 rw-p 00000000 00:00 0":                                    false,
		"x-9f00 rw-p 00000000 00:01 1029 /memfd:berth-template (deleted)":    false,
		"": false,
	} {
		start, end, ok := parseMapping(line)
		if ok != want || ok && (start != 0x7f00 || end != 0x9f00) {
			t.Errorf("%s: %x-%x %v", line, start, end, ok)
		}
	}
}
