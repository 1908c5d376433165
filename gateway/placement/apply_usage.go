package placement

import (
	"encoding/binary"
	"strings"
	"time"

	"github.com/berth-dev/berth/shared/apierr"
	"github.com/berth-dev/berth/shared/proxylink"
)

// month is what a project's rows of one calendar month (UTC) add up to. It is
// kept beside them, so that an allowance is checked without walking them.
type month struct {
	ProjectID string `json:"projectId"`
	Month     uint64 `json:"month"`    // year times 12, plus month from 0
	Platform  int64  `json:"platform"` // bytes through proxies of the platform, both ways
}

// recordUsage takes proxyds' rows: of two with one key the larger numbers
// stay. So a row may come again, late, or after a newer one, and no sum moves.
func (c *change) recordUsage(d recordUsageData) (Result, error) {
	for _, r := range d.Rows {
		if !Countable(r) {
			return Result{}, apierr.New(apierr.Internal, "usage of session %q, %q, hour %d cannot be booked", r.SessionID, r.Type, r.Hour)
		}
	}
	for _, r := range d.Rows {
		c.merge(r)
	}
	return Result{}, nil
}

// Countable says whether a row is one that the record takes.
func Countable(r proxylink.Row) bool {
	for _, word := range []string{r.SessionID, r.ProjectID, r.Incarnation} {
		if word == "" || len(word) > 100 || strings.ContainsRune(word, 0) {
			return false
		}
	}
	return r.Type.Proxied() && r.Hour >= 0 && r.Hour < 1<<32 && min(r.Up, r.Down) >= 0 && max(r.Up, r.Down) < 1<<61
}

func (c *change) merge(r proxylink.Row) {
	known := first[proxylink.Row](c.txn, tabUsage, byID, usageKey(r))
	var before int64
	if known != nil {
		before = known.Up + known.Down
		r.ProjectID = known.ProjectID
		r.Up, r.Down = max(r.Up, known.Up), max(r.Down, known.Down)
		if r == *known {
			return
		}
	}
	c.put(tabUsage, &r)
	if r.Type.Platform() {
		c.addToMonth(r, r.Up+r.Down-before)
	}
}

func (c *change) addToMonth(r proxylink.Row, bytes int64) {
	m := month{ProjectID: r.ProjectID, Month: monthOf(HourBegin(r.Hour))}
	if known := first[month](c.txn, tabMonths, byID, monthKey(m.ProjectID, m.Month)); known != nil {
		m = *known
	}
	m.Platform += bytes
	c.put(tabMonths, &m)
}

// HourBegin is when an hour of a row begins.
func HourBegin(hour int64) time.Time { return time.Unix(hour*3600, 0).UTC() }

func monthOf(t time.Time) uint64 {
	t = t.UTC()
	return uint64(t.Year())*12 + uint64(t.Month()-time.January)
}

// usageKey is session, type, hour, incarnation: a session's rows lie together,
// those of a type in the order of time.
func usageKey(r proxylink.Row) []byte {
	key := binary.BigEndian.AppendUint64(words(r.SessionID, string(r.Type)), uint64(r.Hour))
	return append(key, r.Incarnation...)
}

func monthKey(project string, month uint64) []byte {
	return append(words(project), numberKey(month)...)
}

// endKey puts a project's sessions into the order of their ends; the zero time,
// of those that have not ended, comes last.
func endKey(project string, end time.Time) []byte {
	if end.IsZero() {
		return append(words(project), numberKey(1<<63)...)
	}
	return append(words(project), timeKey(end)...)
}
