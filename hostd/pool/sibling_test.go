package pool

import (
	"context"
	"errors"
	"io"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/berth-dev/berth/hostd/machine"
	"github.com/berth-dev/berth/shared/hostlink"
	"github.com/berth-dev/berth/shared/session"
)

// sibling is another host that has its template after a while, or never.
type sibling struct {
	after time.Time // zero: it builds none
	err   error
}

func (s sibling) MadeTemplate(context.Context, string) (m hostlink.MadeTemplate, err error) {
	switch {
	case s.err != nil:
		return m, s.err
	case s.after.IsZero():
	case time.Now().Before(s.after):
		m.Building = true
	default:
		m.Template = "theirs"
	}
	return m, nil
}

func (sibling) Template(context.Context, string) (io.ReadCloser, error) {
	return io.NopCloser(strings.NewReader("")), nil
}

func (sibling) Close() {}

// One build of a template serves all hosts: who finds a sibling's takes it, and
// of two that lack it the first builds.
func TestTemplatesOfSiblings(t *testing.T) {
	for name, c := range map[string]struct {
		host  func() sibling
		first bool
		want  string // the template by the end; empty: one of our own
	}{
		"has it":                    {func() sibling { return sibling{after: time.Now()} }, false, "theirs"},
		"builds it, before us":      {func() sibling { return sibling{after: time.Now().Add(5 * time.Minute)} }, true, "theirs"},
		"builds it, after us":       {func() sibling { return sibling{after: time.Now().Add(5 * time.Minute)} }, false, ""},
		"has none":                  {func() sibling { return sibling{} }, true, ""},
		"does not answer":           {func() sibling { return sibling{err: errors.New("away")} }, true, ""},
		"builds it for ever, first": {func() sibling { return sibling{after: time.Now().Add(time.Hour)} }, true, "none"},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				k, s := newKeeper(), c.host()
				ts := NewTemplates(k, k.slot, func() []Sibling { return []Sibling{{s, c.first}} })
				defer ts.Close()
				err := ts.Ready(t.Context(), machine.Spec{Kind: session.Shell})
				if c.want == "none" {
					if err == nil || k.built() != 0 {
						t.Errorf("%v, %d builds", err, k.built())
					}
					return
				}
				own := k.made["shell"] != "theirs"
				if err != nil || own != (c.want == "") {
					t.Errorf("%v; template %q, %d builds", err, k.made["shell"], k.built())
				}
				if ts.Building("shell") {
					t.Error("it is said to be building still")
				}
			})
		})
	}
}
