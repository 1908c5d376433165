package session

import (
	"bytes"
	"errors"
	"iter"
	"testing"
	"testing/synctest"

	"github.com/berth-dev/berth/hostd/machine"
)

// pagesOf is a capture of n pages, each third of zeros; the next page overwrites
// the one before, and err ends them if it is not nil.
type pagesOf struct {
	machine.Capture
	n, read, closed int
	err             error
}

func pageAt(i int) []byte { return bytes.Repeat([]byte{byte(i), byte(i >> 8)}, machine.PageSize/2) }

func (c *pagesOf) Close() error { c.closed++; return nil }
func (c *pagesOf) Pages() iter.Seq2[machine.Page, error] {
	return func(yield func(machine.Page, error) bool) {
		buf := make([]byte, machine.PageSize)
		for i := range c.n {
			c.read++
			p := machine.Page{Index: uint64(2 * i)}
			if i%3 != 0 {
				copy(buf, pageAt(i))
				p.Data = buf
			}
			if !yield(p, nil) {
				return
			}
		}
		if c.err != nil {
			yield(machine.Page{}, c.err)
		}
	}
}

// same reads a capture's pages to their end.
func same(t *testing.T, c machine.Capture, n int) (err error) {
	t.Helper()
	i := 0
	for p, e := range c.Pages() {
		if e != nil {
			err = e
			break
		}
		if p.Index != uint64(2*i) || (p.Data == nil) != (i%3 == 0) || p.Data != nil && !bytes.Equal(p.Data, pageAt(i)) {
			t.Fatalf("page %d is %d, %x", i, p.Index, p.Data[:min(4, len(p.Data))])
		}
		i++
	}
	if i != n {
		t.Errorf("%d pages of %d", i, n)
	}
	return err
}

// Pages are read before anybody asks, come as they are, and once more if asked.
func TestPagesAreReadAhead(t *testing.T) {
	for _, n := range []int{0, 1, aheadPages, 10*aheadPages + 7} {
		synctest.Test(t, func(t *testing.T) {
			c := &pagesOf{n: n}
			a := readAhead(c)
			synctest.Wait()
			if c.read != n {
				t.Errorf("%d of %d pages were read ahead", c.read, n)
			}
			for range 2 {
				if err := same(t, a, n); err != nil {
					t.Error(err)
				}
			}
			if err := a.Close(); err != nil || c.closed != 1 {
				t.Errorf("closed %d times, %v", c.closed, err)
			}
		})
	}
}

// What is read ahead has a bound, and ends with the restore that wanted it.
func TestReadingAheadIsBoundedAndEnds(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := &pagesOf{n: 1 << 20}
		a := readAhead(c)
		synctest.Wait()
		if most := (aheadRuns + 1) * aheadPages; c.read > most {
			t.Errorf("%d pages were read, %d at most", c.read, most)
		}
		if err := a.Close(); err != nil || c.closed != 1 {
			t.Errorf("closed %d times, %v", c.closed, err)
		}
	})
}

// A page that cannot be read is the restore's to know of, after those before it.
func TestReadingAheadTellsErrors(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		broken := errors.New("damaged")
		a := readAhead(&pagesOf{n: aheadPages + 3, err: broken})
		if err := same(t, a, aheadPages+3); !errors.Is(err, broken) {
			t.Error(err)
		}
		if err := a.Close(); err != nil {
			t.Error(err)
		}
	})
}
