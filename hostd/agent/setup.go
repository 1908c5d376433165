package main

import (
	"context"
	"encoding/json"
	"fmt"

	"github.com/berth-dev/berth/hostd/agent/freeze"
	"github.com/berth-dev/berth/hostd/agent/shell"
	"github.com/berth-dev/berth/shared/agentlink"
	"github.com/berth-dev/berth/shared/event"
	"github.com/berth-dev/berth/shared/session"
)

// runSetup runs a session's setup commands and tells hostd each step and the
// end. Other commands wait until release.
func (m *machine) runSetup(ctx context.Context, commands []string, release func()) {
	defer release()
	if m.capture.freezer.Await(ctx, freeze.Customer) != nil {
		return // the machine ends before it was let go
	}
	m.notices.add(agentlink.Notice{Setup: &agentlink.Setup{Status: session.SetupRunning}})
	err := m.shells.RunSetup(ctx, commands, m.tellStep)
	end := agentlink.Setup{Status: session.SetupDone}
	if err != nil {
		end = agentlink.Setup{Status: session.SetupFailed, Error: err.Error()}
		m.log.Warn("setup failed", "err", err)
	}
	m.notices.add(agentlink.Notice{Setup: &end})
}

// tellStep is the lifecycle event of a setup step (decisions "Streams").
func (m *machine) tellStep(s shell.Step) {
	e := event.Event{Type: event.Lifecycle, Text: fmt.Sprintf("Setup step %d ended.", s.Index)}
	if s.ExitCode == nil || *s.ExitCode != 0 {
		e.Level = "warn"
		e.Text = fmt.Sprintf("Setup step %d failed.", s.Index)
	}
	e.Data, _ = json.Marshal(struct {
		Step     int    `json:"step"`
		Command  string `json:"command"`
		ExitCode *int   `json:"exitCode"`
	}{s.Index, s.Command, s.ExitCode})
	m.notices.event(e)
}
