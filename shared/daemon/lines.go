package daemon

import (
	"bytes"
	"context"
	"io"
	"log/slog"
	"strings"
)

// LineLog gives libraries that log lines of text ("… [WARN] raft: …") a writer
// into log. A line keeps its level up to ceiling; one without counts as debug.
func LineLog(log *slog.Logger, ceiling slog.Level) io.Writer { return &lineLog{log, ceiling} }

type lineLog struct {
	log     *slog.Logger
	ceiling slog.Level
}

var lineLevels = map[string]slog.Level{
	"WARN": slog.LevelWarn, "ERR": slog.LevelError, "ERROR": slog.LevelError,
}

// Write takes whole lines, as log.Logger and hclog write them.
func (l *lineLog) Write(b []byte) (int, error) {
	for line := range bytes.Lines(b) {
		level, text := slog.LevelDebug, strings.TrimSpace(string(line))
		if _, after, ok := strings.Cut(text, "["); ok { // drops the library's own time stamp
			if name, rest, ok := strings.Cut(after, "]"); ok {
				level, text = lineLevels[name], strings.TrimSpace(rest)
				if level == 0 {
					level = slog.LevelDebug // the libraries' INFO is chatter here
				}
			}
		}
		l.log.Log(context.Background(), min(level, l.ceiling), text)
	}
	return len(b), nil
}
