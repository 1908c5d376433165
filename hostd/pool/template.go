package pool

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/berth-dev/berth/hostd/machine"
)

// templateTime bounds the build of a template: without virtualisation a guest
// with a browser takes minutes to boot.
const templateTime = 15 * time.Minute

// Templates sees to it that a Keeper has the template that machines of a spec
// start from. A build goes on when who asked for it leaves, since the next one
// would begin it again.
type Templates struct {
	keeper   machine.Keeper
	slot     func(context.Context) (Slot, error)
	siblings func() []Sibling
	ctx      context.Context // ends with Close
	stop     context.CancelFunc

	mu     sync.Mutex              // guards what follows
	builds map[machine.Spec]*build // by spec without id and slot
	making map[string]bool         // recipes of those under way
	work   sync.WaitGroup          // added to under mu, before closed
	closed bool
}

// build is one under way, or done.
type build struct {
	done chan struct{}
	err  error // valid after done
}

// NewTemplates makes the templates of a driver; a build runs in a slot of its
// own, which slot makes. Before that the siblings are asked for theirs.
func NewTemplates(keeper machine.Keeper, slot func(context.Context) (Slot, error), siblings func() []Sibling) *Templates {
	ctx, stop := context.WithCancel(context.Background())
	return &Templates{keeper: keeper, slot: slot, siblings: siblings, ctx: ctx, stop: stop,
		builds: map[machine.Spec]*build{}, making: map[string]bool{}}
}

// Ready returns once the template of a spec is there. What failed is tried
// again by the next caller.
func (t *Templates) Ready(ctx context.Context, spec machine.Spec) error {
	spec.ID, spec.Slot = "", machine.Slot{}
	b := t.begin(spec)
	if b == nil {
		return errors.New("hostd is stopping")
	}
	select {
	case <-b.done:
		return b.err
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

// begin gives the build of a spec, a new one if there is none.
func (t *Templates) begin(spec machine.Spec) *build {
	t.mu.Lock()
	defer t.mu.Unlock()
	if b := t.builds[spec]; b != nil || t.closed {
		return b
	}
	b := &build{done: make(chan struct{})}
	t.builds[spec] = b
	t.work.Go(func() {
		if b.err = t.make(spec); b.err != nil {
			t.mu.Lock()
			delete(t.builds, spec)
			t.mu.Unlock()
		}
		close(b.done)
	})
	return b
}

func (t *Templates) make(spec machine.Spec) (err error) {
	ctx, cancel := context.WithTimeoutCause(t.ctx, templateTime, fmt.Errorf("not ready after %s", templateTime))
	defer cancel()
	recipe, err := t.keeper.Recipe(spec)
	if err != nil {
		return err
	}
	t.mark(recipe, true)
	defer t.mark(recipe, false)
	if err := t.fetch(ctx, recipe); err != nil {
		return err
	}
	slot, err := t.slot(ctx)
	if err != nil {
		return fmt.Errorf("make slot: %w", err)
	}
	spec.ID, spec.Slot = newID(), slot.Info()
	_, err = t.keeper.Template(ctx, spec)
	return errors.Join(err, slot.Close(context.WithoutCancel(ctx)))
}

// Close ends builds under way.
func (t *Templates) Close() {
	t.mu.Lock()
	t.closed = true
	t.mu.Unlock()
	t.stop()
	t.work.Wait()
}
