package control

import (
	"context"
	"time"
)

// What an agent may tell: bursts as of a busy session's whole kept ring, and
// then a rate that a few hundred sessions at once do not make a host's disk
// or processors feel.
const (
	burstLines, linesPerSecond = 4096, 200
	burstBytes, bytesPerSecond = 8 << 20, 256 << 10
)

// pace is a token bucket over lines and bytes. Reading stops while it is empty,
// which fills the socket, and the agent has to drop.
type pace struct {
	lines, bytes float64 // left
	at           time.Time
}

// take counts one line and says how long the next has to wait.
func (p *pace) take(now time.Time, size int) time.Duration {
	passed := now.Sub(p.at).Seconds()
	p.at = now
	p.lines = min(burstLines, p.lines+passed*linesPerSecond) - 1
	p.bytes = min(burstBytes, p.bytes+passed*bytesPerSecond) - float64(size)
	owed := max(-p.lines/linesPerSecond, -p.bytes/bytesPerSecond, 0)
	return time.Duration(owed * float64(time.Second))
}

func (p *pace) wait(ctx context.Context, size int) error {
	owed := p.take(time.Now(), size)
	if owed == 0 {
		return nil
	}
	t := time.NewTimer(owed)
	defer t.Stop()
	select {
	case <-ctx.Done():
		return context.Cause(ctx)
	case <-t.C:
		return nil
	}
}
