package sessions

import (
	"testing"
	"testing/synctest"
	"time"
)

func TestTasksAreWaitedForButNotForEver(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var w tasks
		w.wait(time.Hour) // nothing to wait for
		begin := time.Now()
		first, second := w.begin(), w.begin()
		time.AfterFunc(time.Second, first)
		time.AfterFunc(time.Minute, second)
		w.wait(10 * time.Second)
		if took := time.Since(begin); took != 10*time.Second {
			t.Errorf("gave up after %s", took)
		}
		w.wait(time.Hour)
		if took := time.Since(begin); took != time.Minute {
			t.Errorf("waited %s", took)
		}
	})
}
