package main

import (
	"encoding/json"
	"strings"
	"testing"
)

func TestQuantiles(t *testing.T) {
	s := samples{9, 1, 5, 3, 7}
	for q, want := range map[float64]float64{0: 1, 0.5: 5, 0.95: 9, 1: 9} {
		if got := s.quantile(q); got != want {
			t.Errorf("quantile %v: %v, want %v", q, got, want)
		}
	}
}

func TestVerdicts(t *testing.T) {
	for _, c := range []struct {
		f    figure
		want string
	}{
		{figure{Value: 4, Peer: 100, Now: 0.1, Aim: 0.05}, "aim"},
		{figure{Value: 8, Peer: 100, Now: 0.1, Aim: 0.05}, "now"},
		{figure{Value: 11, Peer: 100, Now: 0.1, Aim: 0.05}, "missed"},
		{figure{Value: 60, Peer: 100, Now: 0.25, Aim: 0.5, More: true}, "aim"},
		{figure{Value: 30, Peer: 100, Now: 0.25, Aim: 0.5, More: true}, "now"},
		{figure{Value: 20, Peer: 100, Now: 0.25, Aim: 0.5, More: true}, "missed"},
		{figure{Value: 0}, "aim"},
		{figure{Value: 1}, "missed"},
		{figure{Value: 9, Peer: 1, Plain: true}, ""},
	} {
		c.f.settle()
		if c.f.Verdict != c.want {
			t.Errorf("%+v: %q, want %q", c.f, c.f.Verdict, c.want)
		}
	}
}

func TestTwinSharesNothingWithTheMachine(t *testing.T) {
	out, err := twinConfig([]byte(`{"process":{"args":["/agent"]},"root":{"path":"/mnt"},"mounts":[{"type":"proc"},{"type":"bind"}],
		"linux":{"cgroupsPath":"/berth/x/y","namespaces":[{"type":"user"},{"type":"network","path":"/run/netns/berth-0"}],
		"resources":{"cpu":{"shares":64},"pids":{"limit":9}}}}`), "/image")
	if err != nil || !json.Valid(out) {
		t.Fatal(err)
	}
	for _, gone := range []string{"/run/netns", "/berth/x", "agent", "bind", "shares", "/mnt"} {
		if strings.Contains(string(out), gone) {
			t.Errorf("%q is still there: %s", gone, out)
		}
	}
	for _, kept := range []string{`"limit":9`, `"user"`, `"/image"`} {
		if !strings.Contains(string(out), kept) {
			t.Errorf("%q is missing: %s", kept, out)
		}
	}
	if _, err := twinConfig([]byte(`{}`), "/image"); err == nil {
		t.Error("a config without process passed")
	}
}

func TestTurnsAreFair(t *testing.T) {
	const n, rounds = 4, 12
	first, before := [n]int{}, [n][n]int{}
	for i := range rounds {
		seen, last := [n]bool{}, -1
		for j := range n {
			at := turn(i, j, n)
			if seen[at] {
				t.Fatalf("round %d has side %d twice", i, at)
			}
			seen[at] = true
			if j == 0 {
				first[at]++
			} else {
				before[at][last]++
			}
			last = at
		}
	}
	for side := range n {
		if first[side] != rounds/n {
			t.Errorf("side %d went first %d times of %d rounds", side, first[side], rounds)
		}
		for other, times := range before[side] {
			if times > rounds/2 {
				t.Errorf("side %d came after side %d %d times of %d rounds", side, other, times, rounds)
			}
		}
	}
}
