package main

import (
	"log/slog"
	"os"
	"path/filepath"
	"testing"
)

func TestDamagedEventLogsMakeWay(t *testing.T) {
	path := filepath.Join(t.TempDir(), "events.db")
	if err := os.WriteFile(path, []byte("this was a database before the power went"), 0o600); err != nil {
		t.Fatal(err)
	}
	db, err := openEvents(path, slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	defer db.Close()
	if _, err := os.Stat(path + ".damaged"); err != nil {
		t.Error("the damaged file is not kept:", err)
	}
}
