package main

import (
	"testing"

	"github.com/berth-dev/berth/shared/agentlink"
	"pgregory.net/rapid"
)

// A reader that asks from the last it saw sees every kept notice once, in order.
func TestNoticesAreSeenOnceInOrder(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		n := newNotices()
		added, seen := uint64(0), uint64(0)
		for range rapid.IntRange(1, 40).Draw(t, "rounds") {
			for range rapid.IntRange(0, keepNotices/4).Draw(t, "adds") {
				n.add(agentlink.Notice{})
				added++
			}
			if !rapid.Bool().Draw(t, "reads") {
				continue
			}
			list, _ := n.after(seen)
			want := seen + 1
			if added > keepNotices {
				want = max(want, added-keepNotices+1)
			}
			for _, notice := range list {
				if notice.N != want {
					t.Fatalf("got %d, want %d (of %d)", notice.N, want, added)
				}
				want++
			}
			if want != added+1 {
				t.Fatalf("the last seen is %d of %d", want-1, added)
			}
			seen = added
		}
	})
}

func TestReadersWake(t *testing.T) {
	n := newNotices()
	_, changed := n.after(0)
	n.add(agentlink.Notice{})
	<-changed
	if list, _ := n.after(0); len(list) != 1 || list[0].N != 1 {
		t.Errorf("list = %+v", list)
	}
}
