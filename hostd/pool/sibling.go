package pool

import (
	"context"
	"errors"
	"io"
	"time"

	"github.com/berth-dev/berth/shared/hostlink"
)

// Sibling is another host whose templates would serve here.
type Sibling struct {
	Host  TemplateHost
	First bool // it comes before this host: who builds where all lack a template
}

// TemplateHost is what a sibling is asked.
type TemplateHost interface {
	MadeTemplate(ctx context.Context, recipe string) (hostlink.MadeTemplate, error)
	Template(ctx context.Context, hash string) (io.ReadCloser, error)
	Close()
}

// siblingPoll is how often a sibling that builds is asked again.
const siblingPoll = 500 * time.Millisecond

// fetch brings the template of a recipe from a sibling that has it, and waits
// for one that is building it. That none has it, or none answers, is no error:
// then it is built here. Of two that build at once the first does not wait, so
// nobody waits in a circle.
func (t *Templates) fetch(ctx context.Context, recipe string) error {
	for t.keeper.Made(recipe) == "" {
		wait := false
		for _, s := range t.siblings() {
			made, err := t.take(ctx, s.Host, recipe)
			if made.Template != "" && err == nil {
				return nil
			}
			wait = wait || err == nil && made.Building && s.First
		}
		if !wait {
			return nil
		}
		select {
		case <-time.After(siblingPoll):
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
	return nil
}

// take asks one sibling, and takes its template in when it has it.
func (t *Templates) take(ctx context.Context, from TemplateHost, recipe string) (made hostlink.MadeTemplate, err error) {
	defer from.Close()
	made, err = from.MadeTemplate(ctx, recipe)
	if err != nil || made.Template == "" {
		return made, err
	}
	r, err := from.Template(ctx, made.Template)
	if err != nil {
		return made, err
	}
	err = errors.Join(t.keeper.AddTemplate(ctx, made.Template, r), r.Close())
	if err == nil {
		err = t.keeper.SetMade(recipe, made.Template)
	}
	return made, err
}

// Building says whether the template of a recipe is being made, or waited for,
// here.
func (t *Templates) Building(recipe string) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.making[recipe]
}

func (t *Templates) mark(recipe string, on bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if on {
		t.making[recipe] = true
	} else {
		delete(t.making, recipe)
	}
}
