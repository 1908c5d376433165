package main

import (
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

func TestDriverSaysWhatItLacks(t *testing.T) {
	log := slog.New(slog.DiscardHandler)
	for _, c := range []struct {
		driver string
		want   []string
	}{
		{driverOCI, []string{"driver oci needs it"}},
		{driverMicrovm, []string{"driver microvm needs it"}},
		{driverAuto, []string{"driver microvm needs it", "driver oci needs it"}}, // why neither works
	} {
		cfg := hostConfig{Home: t.TempDir(), Driver: c.driver, Accel: "auto"}
		_, err := cfg.driver(t.Context(), log)
		for _, phrase := range c.want {
			if err == nil || !strings.Contains(err.Error(), phrase) {
				t.Errorf("%s: %v, want %q", c.driver, err, phrase)
			}
		}
	}
}

// What another driver left is swept only where there is something.
func TestSweepOfOtherDriversNeedsThemOnlyIfTheyRan(t *testing.T) {
	log := slog.New(slog.DiscardHandler)
	cfg := hostConfig{Home: t.TempDir()}
	if err := cfg.sweepOthers(t.Context(), driverOCI, log); err != nil {
		t.Errorf("nothing ran: %v", err)
	}
	if err := os.Mkdir(filepath.Join(cfg.Home, homes[driverMicrovm]), 0o700); err != nil {
		t.Fatal(err)
	}
	if err := cfg.sweepOthers(t.Context(), driverMicrovm, log); err != nil {
		t.Errorf("only its own: %v", err)
	}
	if err := cfg.sweepOthers(t.Context(), driverOCI, log); err == nil || !strings.Contains(err.Error(), "needs it") {
		t.Errorf("microVMs of before, and no files for them: %v", err)
	}
}

func TestRecipeNamesWhatTheDriverUses(t *testing.T) {
	cfg := hostConfig{ImageBase: "image", VMFiles: "files", AgentLayer: "layer"}
	if a, b := cfg.recipe(driverOCI), cfg.recipe(driverMicrovm); a != "image layer" || b != "files layer" {
		t.Errorf("%q %q", a, b)
	}
}
