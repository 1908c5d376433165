package snapshot

import (
	"fmt"
	"io"
	"os"
	"testing"

	"github.com/berth-dev/berth/hostd/machine"
)

// programPages are pages as a guest's memory has them: of programs that lie on
// this computer, and a fifth of zeros.
func programPages(b *testing.B, count int) *fakeMachine {
	b.Helper()
	f, err := os.Open("/proc/self/exe")
	if err != nil {
		b.Fatal(err)
	}
	defer f.Close()
	m := &fakeMachine{template: "t", pages: map[uint64][]byte{}, device: make([]byte, 100<<10)}
	for i := range uint64(count) {
		p := make([]byte, machine.PageSize)
		if _, err := io.ReadFull(f, p); err != nil {
			if _, err := f.Seek(int64(i%1000), io.SeekStart); err != nil { // shifted: other pages than before
				b.Fatal(err)
			}
			continue
		}
		m.pages[i] = p
	}
	return m
}

func BenchmarkStore(b *testing.B) {
	for _, mib := range []int{25, 300} {
		m := programPages(b, mib*256)
		s := newStore(b, nil)
		write(b, s, order("first", ""), m)
		b.Run(fmt.Sprintf("write/%dMiB", mib), func(b *testing.B) {
			b.SetBytes(int64(mib) << 20)
			n := 0
			for b.Loop() {
				n++
				id := fmt.Sprint(n)
				i := write(b, s, order(id, ""), m)
				b.ReportMetric(float64(i.Bytes)/float64(mib<<20), "ratio")
				b.StopTimer()
				if err := s.Delete(b.Context(), ref(id)); err != nil {
					b.Fatal(err)
				}
				b.StartTimer()
			}
		})
		b.Run(fmt.Sprintf("again/%dMiB", mib), func(b *testing.B) {
			b.SetBytes(int64(mib) << 20)
			n := 0
			for b.Loop() {
				n++
				id := fmt.Sprint(n)
				i := write(b, s, order(id, "first"), m)
				b.ReportMetric(float64(i.Bytes)/float64(mib<<20), "ratio")
				b.StopTimer()
				if err := s.Delete(b.Context(), ref(id)); err != nil {
					b.Fatal(err)
				}
				b.StartTimer()
			}
		})
		b.Run(fmt.Sprintf("load/%dMiB", mib), func(b *testing.B) {
			b.SetBytes(int64(mib) << 20)
			b.ReportAllocs()
			for b.Loop() {
				l, err := s.Load(b.Context(), ref("first"), testKey)
				if err != nil {
					b.Fatal(err)
				}
				for _, err := range l.Memory.Pages() {
					if err != nil {
						b.Fatal(err)
					}
				}
				if err := l.Close(); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}
