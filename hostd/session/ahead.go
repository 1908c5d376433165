package session

import (
	"iter"
	"sync"
	"sync/atomic"

	"github.com/berth-dev/berth/hostd/machine"
)

// Pages are read ahead in runs, of which so many wait at most: 32 MiB.
const (
	aheadPages = 64
	aheadRuns  = 128
)

// ahead is a capture whose pages are read, unsealed and unpacked while the
// machine that shall take them in is still being made. Its parts must allow to
// be read at once. Close waits until nothing is read any more.
type ahead struct {
	machine.Capture
	runs  chan *pageRun
	stop  chan struct{} // closed by Close
	done  chan struct{} // closed when the reader has ended
	taken atomic.Bool   // the first Pages has the runs
}

// pageRun is some pages one after the other, or why there are no more.
type pageRun struct {
	pages []machine.Page
	data  []byte // what they hold
	err   error
}

// pageRuns are waiting to be used again: fresh memory for all the pages of a
// capture would cost about as much as unpacking some.
var pageRuns = sync.Pool{New: func() any {
	return &pageRun{data: make([]byte, 0, aheadPages*machine.PageSize), pages: make([]machine.Page, 0, aheadPages)}
}}

func newRun() *pageRun {
	r := pageRuns.Get().(*pageRun)
	r.data, r.pages, r.err = r.data[:0], r.pages[:0], nil
	return r
}

func readAhead(c machine.Capture) *ahead {
	a := &ahead{Capture: c, runs: make(chan *pageRun, aheadRuns), stop: make(chan struct{}), done: make(chan struct{})}
	go func() {
		defer close(a.done)
		defer close(a.runs)
		a.read()
	}()
	return a
}

// read gives the pages to whoever takes them, until there are no more or Close.
func (a *ahead) read() {
	run := newRun()
	for p, err := range a.Capture.Pages() {
		if err != nil {
			a.give(run)
			a.give(&pageRun{err: err})
			return
		}
		if p.Data != nil { // it is valid until the next step only
			at := len(run.data)
			run.data = append(run.data, p.Data...)
			p.Data = run.data[at:]
		}
		if run.pages = append(run.pages, p); len(run.pages) < aheadPages {
			continue
		}
		if !a.give(run) {
			return
		}
		run = newRun()
	}
	a.give(run)
}

func (a *ahead) give(r *pageRun) bool {
	select {
	case a.runs <- r:
		return true
	case <-a.stop:
		return false
	}
}

// Pages yields what was read ahead; asked again it reads again.
func (a *ahead) Pages() iter.Seq2[machine.Page, error] {
	if a.taken.Swap(true) {
		return a.Capture.Pages()
	}
	return func(yield func(machine.Page, error) bool) {
		for r := range a.runs {
			if r.err != nil {
				yield(machine.Page{}, r.err)
				return
			}
			for _, p := range r.pages {
				if !yield(p, nil) {
					return
				}
			}
			pageRuns.Put(r)
		}
	}
}

// Close ends the reading and lets go of the capture.
func (a *ahead) Close() error {
	close(a.stop)
	<-a.done
	return a.Capture.Close()
}
