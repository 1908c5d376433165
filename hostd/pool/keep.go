package pool

import "time"

// Keep promises a place on this host to whoever names it, for some time; the
// same name again changes nothing. NoCapacity when the host is full.
func (p *Pool) Keep(name string, long time.Duration) error {
	p.mu.Lock()
	_, again := p.kept[name]
	p.mu.Unlock()
	if again {
		return nil
	}
	if err := p.reserve(); err != nil {
		return err
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if _, again := p.kept[name]; again { // the same order twice at once
		p.total--
		return nil
	}
	p.kept[name] = time.AfterFunc(long, func() { p.Release(name) })
	return nil
}

// Release takes a promise back; one that there is not, or that was used, is no
// error.
func (p *Pool) Release(name string) {
	if p.takeKept(name) {
		p.forget()
	}
}

// takeKept ends a promise, if there is one; its place is the caller's.
func (p *Pool) takeKept(name string) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	t, ok := p.kept[name]
	if ok {
		t.Stop()
		delete(p.kept, name)
	}
	return ok
}
