package server

import (
	"context"
	"errors"
	"fmt"
	"io"
	"strings"
	"testing"
	"testing/iotest"
	"time"

	"github.com/berth-dev/berth/shared/apierr"
	"github.com/berth-dev/berth/shared/hostlink"
	"github.com/berth-dev/berth/shared/session"
)

func (f *fake) Prepare(_ context.Context, id string, o hostlink.Prepare) error {
	if id != "s" || o.OpID != "o" || !o.Memory {
		return fmt.Errorf("prepare %s: %+v", id, o)
	}
	return f.err
}

func (f *fake) TemplateOf(id string) (hostlink.TemplateOf, error) {
	return hostlink.TemplateOf{Template: "template of " + id}, f.err
}

func (f *fake) MadeTemplate(recipe string) hostlink.MadeTemplate {
	return hostlink.MadeTemplate{Template: "made by " + recipe, Building: true}
}

func (f *fake) Capture(_ context.Context, id string, o hostlink.Capture) (hostlink.Captured, error) {
	return hostlink.Captured{Snapshot: session.Snapshot{ID: o.SnapshotID, Host: id}, CaptureMs: 5}, f.err
}

func (f *fake) Restore(_ context.Context, id string, o hostlink.Restore) (hostlink.Restored, error) {
	return hostlink.Restored{Status: hostlink.Status{SessionID: id, Held: &hostlink.Held{OpID: o.OpID, Role: hostlink.Target}}, Memory: o.Snapshot.Memory}, f.err
}

func (f *fake) Verdict(_ context.Context, id string, v hostlink.Verdict) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.acked = append(f.acked, id, v.OpID)
	return f.err
}

func (f *fake) Baggage(_ context.Context, id, snapshot string) (hostlink.Baggage, error) {
	return hostlink.Baggage{SetupErr: id + snapshot}, f.err
}

func (f *fake) Parts(id string) []string { return []string{"part of " + id} }

func (f *fake) Ahead(_ context.Context, id, op string, in io.Reader) error {
	b, err := io.ReadAll(in)
	if err == nil && (id != "s" || op != "o&p" || len(b) != 3*sendPart+1) {
		err = fmt.Errorf("ahead of %s for %s come %d bytes", id, op, len(b))
	}
	return errors.Join(err, f.err)
}

func (f *fake) OpenSnapshot(_ context.Context, id string, have []string) (io.ReadCloser, error) {
	if f.body != nil {
		return io.NopCloser(f.body), nil
	}
	return io.NopCloser(strings.NewReader(id + " without " + strings.Join(have, " "))), f.err
}

func (f *fake) DeleteSnapshot(_ context.Context, id, sessionID string) error {
	return f.Ack([]string{id, sessionID})
}

func (f *fake) OpenTemplate(hash string) (io.ReadCloser, error) {
	if hash != "known" {
		return nil, apierr.New(apierr.NotFound, "no template %s", hash)
	}
	return io.NopCloser(strings.NewReader(strings.Repeat("t", 3*sendPart+1))), f.err
}

func captureOrder() hostlink.Capture {
	return hostlink.Capture{OpID: "o", Kind: session.Move, Epoch: 3, SnapshotID: "snap", Key: make([]byte, 32)}
}

func restoreOrder() hostlink.Restore {
	return hostlink.Restore{OpID: "o", Kind: session.Move, Acquire: acquire(), Snapshot: session.Snapshot{ID: "snap", Memory: true}, Key: make([]byte, 32)}
}

func TestEveryOrderOfAnOperationArrives(t *testing.T) {
	f := &fake{}
	c, _ := serve(t, f)
	ctx := t.Context()
	if err := c.Prepare(ctx, "s", hostlink.Prepare{OpID: "o", Kind: session.Shell, Memory: true}); err != nil {
		t.Errorf("Prepare: %v", err)
	}
	for what, bad := range map[string]hostlink.Prepare{"operation": {Kind: session.Shell}, "kind": {OpID: "o", Kind: "x"}} {
		if err := c.Prepare(ctx, "s", bad); !apierr.Is(err, apierr.InvalidRequest) {
			t.Errorf("Prepare without %s: %v", what, err)
		}
	}
	if got, err := c.MadeTemplate(ctx, "r&r"); err != nil || got != (hostlink.MadeTemplate{Template: "made by r&r", Building: true}) {
		t.Errorf("MadeTemplate: %+v %v", got, err)
	}
	if got, err := c.TemplateOf(ctx, "s"); err != nil || got.Template != "template of s" {
		t.Errorf("TemplateOf: %+v %v", got, err)
	}
	if done, err := c.Capture(ctx, "s", captureOrder()); err != nil || done.Snapshot.ID != "snap" || done.CaptureMs != 5 {
		t.Errorf("Capture: %+v %v", done, err)
	}
	if parts, err := c.Parts(ctx, "s"); err != nil || strings.Join(parts, ",") != "part of s" {
		t.Errorf("Parts: %q %v", parts, err)
	}
	if err := c.Ahead(ctx, "s", "o&p", strings.NewReader(strings.Repeat("a", 3*sendPart+1))); err != nil {
		t.Errorf("Ahead: %v", err)
	}
	if done, err := c.Restore(ctx, "s", restoreOrder()); err != nil || !done.Memory || done.Status.Held == nil || done.Status.Held.OpID != "o" {
		t.Errorf("Restore: %+v %v", done, err)
	}
	if err := c.Verdict(ctx, "s", hostlink.Verdict{OpID: "o", Committed: true}); err != nil || strings.Join(f.acked, " ") != "s o" {
		t.Errorf("Verdict: %v %v", err, f.acked)
	}
	if b, err := c.Baggage(ctx, "s", "a&b"); err != nil || b.SetupErr != "sa&b" {
		t.Errorf("Baggage: %+v %v", b, err)
	}
	if err := c.DeleteSnapshot(ctx, "snap", "a&b"); err != nil || f.acked[2] != "snap" || f.acked[3] != "a&b" {
		t.Errorf("DeleteSnapshot: %v %v", err, f.acked)
	}
	r, err := c.Snapshot(ctx, "snap", "p1", "p2")
	if err != nil {
		t.Fatal(err)
	}
	if b, err := io.ReadAll(r); err != nil || string(b) != "snap without p1 p2" {
		t.Errorf("Snapshot: %q %v", b, err)
	}
	r.Close()
	if r, err = c.Template(ctx, "known"); err != nil {
		t.Fatal(err)
	}
	if b, err := io.ReadAll(r); err != nil || len(b) != 3*sendPart+1 {
		t.Errorf("Template: %d bytes, %v", len(b), err)
	}
	r.Close()
	if _, err := c.Template(ctx, "other"); !apierr.Is(err, apierr.NotFound) {
		t.Errorf("another template: %v", err)
	}
}

func TestBadOrdersOfAnOperationAreRefused(t *testing.T) {
	c, _ := serve(t, &fake{})
	for name, change := range map[string]func(*hostlink.Capture, *hostlink.Restore){
		"no operation": func(a *hostlink.Capture, b *hostlink.Restore) { a.OpID, b.OpID = "", "" },
		"kind":         func(a *hostlink.Capture, b *hostlink.Restore) { a.Kind, b.Kind = session.Resume, session.Pause },
		"path":         func(a *hostlink.Capture, b *hostlink.Restore) { a.SnapshotID, b.Snapshot.ID = "../x", "../x" },
		"key":          func(a *hostlink.Capture, b *hostlink.Restore) { a.Key, b.Key = a.Key[1:], nil },
		"other's":      func(a *hostlink.Capture, b *hostlink.Restore) { a.Previous, b.Acquire.SessionID = "a/b", "other" },
	} {
		a, b := captureOrder(), restoreOrder()
		change(&a, &b)
		if _, err := c.Capture(t.Context(), "s", a); !apierr.Is(err, apierr.InvalidRequest) {
			t.Errorf("%s: Capture: %v", name, err)
		}
		if _, err := c.Restore(t.Context(), "s", b); !apierr.Is(err, apierr.InvalidRequest) {
			t.Errorf("%s: Restore: %v", name, err)
		}
	}
	if err := c.Verdict(t.Context(), "s", hostlink.Verdict{}); !apierr.Is(err, apierr.InvalidRequest) {
		t.Errorf("verdict on nothing: %v", err)
	}
}

// A stream that breaks off must not look whole.
func TestBrokenStreamsEndWithAnError(t *testing.T) {
	body := io.MultiReader(strings.NewReader(strings.Repeat("x", sendPart+5)), iotest.ErrReader(errors.New("disk")))
	c, _ := serve(t, &fake{body: body})
	r, err := c.Snapshot(t.Context(), "snap")
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	done := make(chan error, 1)
	go func() { _, err := io.Copy(io.Discard, r); done <- err }()
	select {
	case err := <-done:
		if err == nil {
			t.Error("it looks whole")
		}
	case <-time.After(5 * time.Second):
		t.Error("it hangs")
	}
}
