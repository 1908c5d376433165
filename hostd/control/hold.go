package control

import (
	"context"
	"fmt"
	"io"
	"math"
	"net/http"
	"time"

	"github.com/berth-dev/berth/shared/agentlink"
	"github.com/berth-dev/berth/shared/event"
)

// Freeze makes the customer's processes stand still.
func (a *Agent) Freeze(ctx context.Context, f agentlink.Freeze) error {
	return a.do(ctx, http.MethodPost, agentlink.ControlFreeze, f, nil)
}

// A machine that has just been restored may take long to answer at first, and
// the word of the time must not be as old as that. So the clocks are compared
// until an answer was quick: half of what it took is how wrong the time may be.
const (
	quick    = 30 * time.Millisecond
	compares = 5
)

// Thaw lets the machine go on once its clock, entropy and identity are right;
// t's Now and AsOf are filled in here.
func (a *Agent) Thaw(ctx context.Context, t agentlink.Thaw) error {
	best := time.Duration(math.MaxInt64)
	for range compares {
		var c agentlink.Clock
		asked := time.Now()
		if err := a.do(ctx, http.MethodGet, agentlink.ControlClock, nil, &c); err != nil {
			return err
		}
		took := time.Since(asked)
		if took < best {
			best, t.Now, t.AsOf = took, asked.Add(took/2), c.Monotonic
		}
		if best <= quick {
			break
		}
	}
	return a.do(ctx, http.MethodPost, agentlink.ControlThaw, t, nil)
}

// Whole returns when all is there that a fresh thaw leaves for later.
func (a *Agent) Whole(ctx context.Context) error {
	return a.do(ctx, http.MethodPost, agentlink.ControlWhole, struct{}{}, nil)
}

// Export opens the session's portable state, of which more than most bytes are
// an error: how much there is, the machine says, and it may lie. The caller
// closes it; it ends with io.EOF only where the agent ended it.
func (a *Agent) Export(ctx context.Context, most int64) (io.ReadCloser, error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://agent"+agentlink.ControlExport, nil)
	if err != nil {
		return nil, err
	}
	resp, err := a.http.Do(req)
	if err != nil {
		return nil, fmt.Errorf("agent %s: %w", agentlink.ControlExport, err)
	}
	if resp.StatusCode != http.StatusOK {
		defer resp.Body.Close()
		return nil, refused(agentlink.ControlExport, resp)
	}
	return &bounded{resp.Body, most}, nil
}

// Import gives a machine that was started with Held the portable state of
// another one.
func (a *Agent) Import(ctx context.Context, state io.Reader) error {
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, "http://agent"+agentlink.ControlImport, io.NopCloser(state))
	if err != nil {
		return err
	}
	resp, err := a.http.Do(req)
	if err != nil {
		return fmt.Errorf("agent %s: %w", agentlink.ControlImport, err)
	}
	defer resp.Body.Close()
	if resp.StatusCode >= 300 {
		return refused(agentlink.ControlImport, resp)
	}
	return nil
}

// refused is the error of an answer that is none.
func refused(path string, resp *http.Response) error {
	b, _ := io.ReadAll(io.LimitReader(resp.Body, maxError+1)) // what came of it is enough
	return fmt.Errorf("agent %s: status %d: %s", path, resp.StatusCode, event.Cut(string(b), maxError))
}

// bounded is a stream that fails, rather than ends, past its bound.
type bounded struct {
	io.ReadCloser
	left int64
}

func (b *bounded) Read(p []byte) (int, error) {
	n, err := b.ReadCloser.Read(p)
	if b.left -= int64(n); b.left < 0 {
		return 0, fmt.Errorf("agent %s: more than the machine's disk holds", agentlink.ControlExport)
	}
	return n, err
}
