package cdp

import (
	"slices"
	"testing"
	"testing/synctest"
	"time"
)

func TestPlatformCloseKeepsAClientForTheGrace(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var told []int
		c := newCount(time.Minute, func(n int) { told = append(told, n) })
		c.enter()
		c.leave(true)
		time.Sleep(59 * time.Second)
		if n := c.now(); n != 1 {
			t.Errorf("within the grace: %d clients", n)
		}
		c.enter() // it is back
		time.Sleep(2 * time.Minute)
		if n := c.now(); n != 1 {
			t.Errorf("back again: %d clients", n)
		}
		c.enter()
		c.leave(true)
		c.leave(true)
		time.Sleep(61 * time.Second)
		synctest.Wait()
		if n := c.now(); n != 0 {
			t.Errorf("after the grace: %d clients", n)
		}
		if want := []int{1, 2, 1, 0}; !slices.Equal(told, want) {
			t.Errorf("told %v, want %v", told, want)
		}
	})
}

func TestStopEndsGraces(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		told := 0
		c := newCount(time.Minute, func(int) { told++ })
		c.enter()
		c.leave(true)
		c.stop()
		time.Sleep(2 * time.Minute)
		synctest.Wait()
		if told != 1 {
			t.Errorf("told %d times, want once: the rest is the machine's end", told)
		}
	})
}
