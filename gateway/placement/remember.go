package placement

// remember keeps the answer for a retry of the same command, and forgets old
// ones: those that are both old and many.
func (c *change) remember(res Result) {
	c.put(tabAnswers, &answer{c.cmd.ID, c.head.Index, c.head.Clock, res})
	c.head.Remembered++
	forget(c, tabAnswers, func(a *answer) bool {
		old := c.head.Clock-a.At >= answerAge.Milliseconds()
		if c.head.Remembered <= answersKept || !old && c.head.Remembered <= answersMax {
			return false
		}
		c.head.Remembered--
		return true
	})
}

// forgetIdempotency clears keys past their day.
func (c *change) forgetIdempotency() {
	forget(c, tabIdem, func(k *idemKey) bool {
		return c.head.Clock-k.At >= idempotencyAge.Milliseconds()
	})
}

// forget deletes the oldest rows of a table while gone says so, a bounded
// number at a time: no command pays for a long silence.
func forget[T any](c *change, table string, gone func(*T) bool) {
	it, err := c.txn.Get(table, byAge+"_prefix", []byte{})
	must(err)
	var old []*T
	for row := it.Next(); row != nil && len(old) < pruneStep; row = it.Next() {
		if r := row.(*T); gone(r) {
			old = append(old, r)
			continue
		}
		break
	}
	for _, r := range old { // after the walk: deleting under an iterator is not allowed
		must(c.txn.Delete(table, r))
	}
}
