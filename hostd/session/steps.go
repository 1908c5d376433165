package session

import (
	"fmt"
	"log/slog"
	"time"

	"github.com/berth-dev/berth/shared/daemon"
)

// steps tells how long the steps of an order took: each as
// berth_NAME_seconds{step="STEP"}, all together in a line of the log.
type steps struct {
	name string
	last time.Time
	took []any
}

func newSteps(name string) *steps { return &steps{name: name, last: time.Now()} }

// done ends a step, and begins the next.
func (s *steps) done(step string) {
	now := time.Now()
	took := now.Sub(s.last)
	daemon.Histogram(fmt.Sprintf("berth_%s_seconds{step=%q}", s.name, step)).Update(took.Seconds())
	s.took, s.last = append(s.took, step, took.Round(100*time.Microsecond)), now
}

func (s *steps) log(l *slog.Logger) { l.Debug("steps of a "+s.name, s.took...) }
