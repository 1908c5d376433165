package link

// Renew gives the machine another lineage: its memory is a clone, so no stream
// that was opened before has its other end any more. All streams are dropped
// without a word to whoever the other end may be; a dialler that comes back to
// one gets ErrLineage or ErrUnknownStream. Streams opened from now on carry the
// new lineage.
func (l *Listener) Renew(lineage [16]byte) {
	l.mu.Lock()
	l.opt.Lineage = lineage
	all := make([]*Conn, 0, len(l.streams))
	for _, c := range l.streams {
		all = append(all, c)
	}
	l.mu.Unlock()
	for _, c := range all {
		c.mu.Lock()
		c.rq.drop()
		c.retire(ErrLineage)
		c.mu.Unlock()
	}
}
