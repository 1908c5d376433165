package sessions

import "testing"

// A create that fits has a machine before the record has decided: one beyond
// the limit must not get to the record before it.
func TestCreatesBeyondTheLimitWaitForThoseThatFit(t *testing.T) {
	var tl tally
	limit := func(n int) func(int) bool { return func(others int) bool { return others < n } }
	fits, before, first := tl.enter("p", limit(2))
	if !fits || len(before) != 0 {
		t.Fatalf("the first: %v, after %d", fits, len(before))
	}
	if fits, before, decided := tl.enter("other", limit(2)); !fits || len(before) != 0 {
		t.Errorf("another project's: %v, after %d", fits, len(before))
	} else {
		decided()
	}
	fits, before, second := tl.enter("p", limit(2))
	if !fits || len(before) != 0 {
		t.Fatalf("the second: %v, after %d", fits, len(before))
	}
	first()
	_, _, third := tl.enter("p", limit(1))
	fits, before, fourth := tl.enter("p", limit(1))
	if fits || len(before) != 1 {
		t.Fatalf("one beyond the limit: %v, after %d", fits, len(before))
	}
	select {
	case <-before[0]:
		t.Error("it did not have to wait for the second")
	default:
	}
	second()
	<-before[0]
	third()
	fourth()
	if len(tl.now) != 0 {
		t.Errorf("still noted: %v", tl.now)
	}
}
