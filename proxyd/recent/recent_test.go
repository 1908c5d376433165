package recent

import (
	"fmt"
	"testing"
)

func TestMapIsBounded(t *testing.T) {
	r := New[string, int](3)
	for i := range 5 {
		r.Put(fmt.Sprint(i), i)
		r.Get("1") // in use: stays
	}
	for key, want := range map[string]bool{"0": false, "1": true, "2": false, "3": true, "4": true} {
		if _, ok := r.Get(key); ok != want {
			t.Errorf("%s: %v", key, ok)
		}
	}
	r.Put("3", 33)
	if v, _ := r.Get("3"); v != 33 || len(r.at) != 3 || r.order.Len() != 3 {
		t.Errorf("%d, %d of %d", v, len(r.at), r.order.Len())
	}
}
