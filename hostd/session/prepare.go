package session

import (
	"context"
	"fmt"
	"time"

	"github.com/berth-dev/berth/hostd/machine"
	"github.com/berth-dev/berth/shared/apierr"
	"github.com/berth-dev/berth/shared/hostlink"
)

// Prepare keeps a place for a session that is to move here, while it still runs
// elsewhere, and fetches the template that its memory goes back to: what can
// fail, or take long, does so before anything stops.
func (h *Host) Prepare(ctx context.Context, id string, o hostlink.Prepare) error {
	if h.room != nil {
		if err := h.room(o.Kind); err != nil {
			return err
		}
	}
	if err := h.pool.Keep(o.OpID, time.Until(o.Deadline)); err != nil {
		return err
	}
	if err := h.haveTemplate(ctx, id, o); err != nil {
		h.pool.Release(o.OpID)
		return h.notRestored(ctx, id, fmt.Errorf("prepare: %w", err))
	}
	if o.Memory && o.From != "" && h.keeper != nil {
		h.expect(o, id)
	}
	return nil
}

func (h *Host) haveTemplate(ctx context.Context, id string, o hostlink.Prepare) error {
	if !o.Memory || o.From == "" || h.keeper == nil {
		return nil
	}
	peer := h.peers(o.From)
	defer peer.Close()
	t, err := peer.TemplateOf(ctx, id)
	if err == nil && t.Template == "" { // it will come without its memory
		return nil
	}
	if err == nil && !h.keeper.HasTemplate(t.Template) {
		err = h.fetchTemplate(ctx, peer, t.Template)
	}
	if err == nil { // in memory, and proven: the restore shall not have to wait for that
		_, err = h.keeper.Template(ctx, machine.Spec{Kind: o.Kind, Template: t.Template})
	}
	return err
}

// MadeTemplate says whether this host has, or makes, the template of a recipe.
func (h *Host) MadeTemplate(recipe string) (m hostlink.MadeTemplate) {
	if h.keeper != nil {
		m.Template = h.keeper.Made(recipe)
		m.Building = h.building != nil && h.building(recipe)
	}
	return m
}

// TemplateOf names the template of a session's machine; none where no host could
// restore the machine's memory. That of a target too: who asks may know of the
// commit before this host does.
func (h *Host) TemplateOf(id string) (t hostlink.TemplateOf, err error) {
	s := h.findPart(id)
	if s == nil {
		return t, h.gone(id)
	}
	var kept machine.Kept
	if s.guest != nil {
		kept = s.kept()
	}
	if kept == nil {
		return t, apierr.New(apierr.NotFound, "session %s has a machine without a template", id)
	}
	if kept.Restorable() != nil {
		return t, nil
	}
	return hostlink.TemplateOf{Template: kept.TemplateHash()}, nil
}
