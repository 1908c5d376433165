package daemon

import (
	"bytes"
	"fmt"
	"log/slog"
	"testing"
)

func TestLineLogKeepsLevels(t *testing.T) {
	var out bytes.Buffer
	log := slog.New(slog.NewTextHandler(&out, &slog.HandlerOptions{Level: slog.LevelDebug,
		ReplaceAttr: func(_ []string, a slog.Attr) slog.Attr {
			if a.Key == slog.TimeKey {
				return slog.Attr{}
			}
			return a
		}}))
	fmt.Fprint(LineLog(log, slog.LevelWarn), "2026-09-01T12:00:00Z [INFO]  raft: hello\n2026 [ERROR] raft: bad\nplain words\n[WARN] w [x]\n")
	want := `level=DEBUG msg="raft: hello"
level=WARN msg="raft: bad"
level=DEBUG msg="plain words"
level=WARN msg="w [x]"
`
	if out.String() != want {
		t.Errorf("logged\n%swant\n%s", out.String(), want)
	}
}
