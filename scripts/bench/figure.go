package main

import (
	"bytes"
	"encoding/json"
	"fmt"
	"math"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"time"
)

// figure is one line of the table. Value and Peer are in Unit; Ratio is
// Value/Peer.
type figure struct {
	What    string  `json:"what"`
	Beside  string  `json:"beside"`
	Unit    string  `json:"unit"`
	Value   float64 `json:"value"`
	Peer    float64 `json:"peer,omitempty"`
	Ratio   float64 `json:"ratio,omitempty"`
	Now     float64 `json:"reachNow,omitempty"` // bound of the ratio, or of the value where there is no peer
	Aim     float64 `json:"aim,omitempty"`
	More    bool    `json:"moreIsBetter,omitempty"`
	Plain   bool    `json:"plain,omitempty"` // reported beside the others, nothing to reach
	Count   int     `json:"count"`           // measurements on each side
	Note    string  `json:"note,omitempty"`
	Verdict string  `json:"verdict"`
}

// settle computes ratio and verdict.
func (f *figure) settle() {
	judged := f.Value
	if f.Peer != 0 {
		f.Ratio = f.Value / f.Peer
		judged = f.Ratio
	}
	within := func(bound float64) bool { return judged <= bound && !f.More || judged >= bound && f.More }
	switch {
	case f.Plain:
		f.Verdict = ""
	case within(f.Aim):
		f.Verdict = "aim"
	case within(f.Now):
		f.Verdict = "now"
	default:
		f.Verdict = "missed"
	}
}

// number writes a ratio; small ones as a fraction, as the table's bounds are.
func number(r float64) string {
	switch {
	case r == 0:
		return "0"
	case r <= 0.34 && r > 0:
		return "1/" + strconv.FormatFloat(1/r, 'f', 1, 64)
	}
	return strconv.FormatFloat(r, 'f', 2, 64)
}

func bound(f figure, v float64) string {
	switch {
	case f.Plain:
		return ""
	case v > 0 && v < 0.25, v == 1.0/3, v == 0.25 && !f.More:
		return "1/" + strconv.Itoa(int(math.Round(1/v)))
	}
	return strconv.FormatFloat(v, 'f', -1, 64)
}

func (f figure) show(v float64) string {
	digits := 0
	switch a := math.Abs(v); {
	case f.Unit == "left":
	case a < 1:
		digits = 3
	case a < 10:
		digits = 2
	case a < 100:
		digits = 1
	}
	return strconv.FormatFloat(v, 'f', digits, 64) + " " + f.Unit
}

// report is what a run keeps.
type report struct {
	Machine string   `json:"machine"`
	Quick   bool     `json:"quick,omitempty"`
	Seconds int      `json:"seconds"`
	Figures []figure `json:"figures"`
}

func (r report) markdown() string {
	var b strings.Builder
	fmt.Fprintf(&b, "Measured on %s, in %d s. Medians unless said otherwise; ratio = Berth / peer.\n\n", r.Machine, r.Seconds)
	b.WriteString("| what | Berth | beside | peer | ratio | reach now | aim | reached |\n|---|---|---|---|---|---|---|---|\n")
	for _, f := range r.Figures {
		peer, ratio := "", ""
		if f.Peer != 0 {
			peer, ratio = f.show(f.Peer), number(f.Ratio)
		}
		fmt.Fprintf(&b, "| %s | %s | %s | %s | %s | %s | %s | %s |\n",
			f.What, f.show(f.Value), f.Beside, peer, ratio, bound(f, f.Now), bound(f, f.Aim), f.Verdict)
	}
	b.WriteString("\n")
	for _, f := range r.Figures {
		if f.Note != "" {
			fmt.Fprintf(&b, "- %s: %s\n", f.What, f.Note)
		}
	}
	return b.String()
}

// keep writes the table for people and for programs.
func (r report) keep(dir string) error {
	name := "latest"
	if r.Quick {
		name = "quick"
	}
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return err
	}
	var b bytes.Buffer
	enc := json.NewEncoder(&b)
	enc.SetIndent("", "  ")
	enc.SetEscapeHTML(false)
	if err := enc.Encode(r); err != nil {
		return err
	}
	if err := os.WriteFile(filepath.Join(dir, name+".json"), b.Bytes(), 0o644); err != nil {
		return err
	}
	return os.WriteFile(filepath.Join(dir, name+".md"), []byte(r.markdown()), 0o644)
}

// describe says what kind of machine this is, not which.
func describe() string {
	kib, _ := meminfo("MemTotal")
	kernel, _ := os.ReadFile("/proc/sys/kernel/osrelease")
	load, _ := os.ReadFile("/proc/loadavg")
	busy, _, _ := strings.Cut(string(load), " ")
	major := strings.SplitN(string(kernel), ".", 3)
	return fmt.Sprintf("%d cores, %d GiB, Linux %s, load %s at the end", runtime.NumCPU(), (kib+1<<19)>>20, strings.Join(major[:min(2, len(major))], "."), busy)
}

// samples are measurements of one side.
type samples []float64

func (s *samples) since(t time.Time) { *s = append(*s, float64(time.Since(t).Microseconds())/1000) }

func (s samples) quantile(q float64) float64 {
	if len(s) == 0 {
		return math.NaN()
	}
	sorted := slices.Sorted(slices.Values(s))
	return sorted[max(1, int(math.Ceil(q*float64(len(sorted)))))-1]
}

func (s samples) median() float64 { return s.quantile(0.5) }
