package pool

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/berth-dev/berth/hostd/machine"
	"github.com/berth-dev/berth/shared/session"
)

// PruneTemplates removes the templates of which this host has no more use: no
// machine runs from them, none of paused needs them, and they are not what
// machines are made from today. Those that have been of no use for less than
// rest stay. Call it when nothing starts: after machines were adopted, before
// anybody can order one.
func (b Bootstrap) PruneTemplates(ctx context.Context, paused []string, rest time.Duration) (removed []string, err error) {
	keeper, ok := b.Driver.(machine.Keeper)
	if !ok {
		return nil, nil
	}
	// Only where there is a template at all: recipes name the guest image by its
	// content, which takes long to read for the first time.
	today := sync.OnceValues(func() ([]string, error) { return b.templatesOfToday(keeper) })
	var unknown error
	removed, err = keeper.PruneTemplates(ctx, func(hash string) bool {
		if slices.Contains(paused, hash) {
			return true
		}
		made, err := today()
		unknown = err
		return err != nil || slices.Contains(made, hash)
	}, rest)
	return removed, errors.Join(unknown, err)
}

// templatesOfToday are those that machines are made from today, as far as they
// are here.
func (b Bootstrap) templatesOfToday(keeper machine.Keeper) (made []string, err error) {
	for _, kind := range session.Kinds() {
		recipe, err := keeper.Recipe(b.spec(kind))
		if err != nil {
			return nil, fmt.Errorf("prune templates: %w", err)
		}
		made = append(made, keeper.Made(recipe))
	}
	return made, nil
}
