package main

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
)

// version is the first call of any client: its answer says that CDP works.
func (s *socket) version() error {
	_, err := s.call("", "Browser.getVersion", "")
	return err
}

// attach attaches to the first page and returns the CDP session.
func (s *socket) attach() (string, error) {
	msg, err := s.call("", "Target.getTargets", "")
	if err != nil {
		return "", err
	}
	var targets struct {
		Result struct {
			TargetInfos []struct{ TargetID, Type string }
		}
	}
	if err := json.Unmarshal(msg, &targets); err != nil {
		return "", err
	}
	for _, t := range targets.Result.TargetInfos {
		if t.Type != "page" {
			continue
		}
		msg, err := s.call("", "Target.attachToTarget", `{"flatten":true,"targetId":"`+t.TargetID+`"}`)
		if err != nil {
			return "", err
		}
		var attached struct{ Result struct{ SessionID string } }
		err = json.Unmarshal(msg, &attached)
		return attached.Result.SessionID, err
	}
	return "", errors.New("the browser has no page")
}

// open navigates and waits for the load event.
func (s *socket) open(session, url string) error {
	if _, err := s.call(session, "Page.enable", ""); err != nil {
		return err
	}
	if err := s.send(session, "Page.navigate", `{"url":"`+url+`"}`); err != nil {
		return err
	}
	answered, loaded := false, false
	for !answered || !loaded {
		msg, err := s.read()
		if err != nil {
			return fmt.Errorf("open %s: %w", url, err)
		}
		switch {
		case bytes.HasPrefix(msg, s.answer()):
			if bytes.Contains(msg, []byte(`"errorText"`)) || bytes.Contains(msg, []byte(`"error":{`)) {
				return fmt.Errorf("open %s: %s", url, msg)
			}
			answered = true
		case bytes.Contains(msg, []byte(`"Page.loadEventFired"`)):
			loaded = answered // one from before is about:blank's
		}
	}
	return nil
}
