package microvm

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"
)

// fakeQEMU answers each command with what reply gives, line by line.
func fakeQEMU(t *testing.T, reply func(command string) string) *monitor {
	t.Helper()
	dir := t.TempDir()
	ln, err := net.Listen("unix", filepath.Join(dir, socketName))
	if err != nil {
		t.Fatal(err)
	}
	served := make(chan struct{})
	go func() {
		defer close(served)
		conn, err := ln.Accept()
		if err != nil {
			return
		}
		defer conn.Close()
		fmt.Fprintln(conn, `{"QMP": {"version": {}, "capabilities": []}}`)
		for lines := bufio.NewScanner(conn); lines.Scan(); {
			var q struct{ Execute, ID string }
			if json.Unmarshal(lines.Bytes(), &q) != nil {
				return
			}
			text := `{"return": {}}`
			if q.Execute != "qmp_capabilities" {
				text = reply(q.Execute)
			}
			if text == "" {
				return
			}
			fmt.Fprintln(conn, `{"return": {"status": "of another"}, "id": "another"}`)
			fmt.Fprintln(conn, strings.ReplaceAll(text, `{"return"`, `{"id": "`+q.ID+`", "return"`))
		}
	}()
	m, err := dialMonitor(t.Context(), dir)
	t.Cleanup(func() {
		if m != nil {
			_ = m.Close()
		}
		ln.Close()
		<-served
	})
	if err != nil {
		t.Fatal(err)
	}
	return m
}

func TestMonitorSkipsEvents(t *testing.T) {
	m := fakeQEMU(t, func(command string) string {
		return `{"event": "STOP", "timestamp": {}}` + "\n" + `{"return": {"status": "` + command + `"}}` + "\n" + `{"event": "RESUME"}`
	})
	var wg sync.WaitGroup
	for range 20 {
		wg.Go(func() {
			if status, err := m.status(t.Context()); err != nil || status != "query-status" {
				t.Errorf("%q, %v", status, err)
			}
		})
	}
	wg.Wait()
}

func TestMonitorErrors(t *testing.T) {
	m := fakeQEMU(t, func(command string) string {
		switch command {
		case "refused":
			return `{"return": {}, "error": {"class": "GenericError", "desc": "no such luck"}}`
		case "noise":
			return "noise"
		}
		return `{"return": 7}`
	})
	if err := m.do(t.Context(), "refused", nil, nil); err == nil || !strings.Contains(err.Error(), "no such luck") {
		t.Errorf("got %v", err)
	}
	var text string
	if err := m.do(t.Context(), "seven", nil, &text); err == nil {
		t.Error("took a number for a text")
	}
	if err := m.do(t.Context(), "noise", nil, nil); !errors.Is(err, errMonitor) {
		t.Errorf("noise gave %v", err)
	}
	if err := m.do(t.Context(), "after", nil, nil); err == nil {
		t.Error("spoke to a closed socket")
	}
}

// TestMonitorThatHangs: an answer that comes too late is nobody's.
func TestMonitorThatHangs(t *testing.T) {
	release := make(chan struct{})
	m := fakeQEMU(t, func(string) string { <-release; return `{"return": {}}` })
	ctx, cancel := context.WithTimeout(t.Context(), 30*time.Millisecond)
	defer cancel()
	if err := m.do(ctx, "hang", nil, nil); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("got %v", err)
	}
	close(release)
	if err := m.do(t.Context(), "next", nil, nil); err == nil {
		t.Error("the next command got an answer")
	}
}

func TestMonitorOfNobody(t *testing.T) {
	if _, err := dialMonitor(t.Context(), t.TempDir()); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("got %v", err)
	}
}
