// Command bench measures Berth beside what each figure stands for: Chromium
// spawned by hand, runc exec, nginx. Both sides of a row run in the same run,
// in interleaved rounds, and what counts is the ratio of their medians; a
// machine that is busy with other things slows both. It starts stacks of its
// own by scripts/daemons.sh (run.sh gives it home and addresses), prints a
// table, and keeps it as Markdown and JSON.
package main

import (
	"context"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"slices"
	"strings"
	"syscall"
	"time"
)

// row is one line of the table, or several that come from the same rounds.
type row struct {
	name  string // what -only selects
	setup setup  // rows with the same one share a stack
	run   func(b *bench, ctx context.Context) error
}

var rows = []row{
	{"create", containers(figuresPool), (*bench).create},
	{"lifecycle", containers(figuresPool), (*bench).lifecycle},
	{"evaluate", containers(figuresPool), (*bench).evaluate},
	{"exec", containers(figuresPool), (*bench).exec},
	{"file", containers(figuresPool), (*bench).file},
	{"burst", containers("browser=12,shell=0,both=0"), (*bench).burst},
	{"memory", containers(emptyPool), (*bench).memory},
	{"egress", containers(emptyPool), (*bench).egress},
	{"crash", containers("browser=1,shell=4,both=0"), (*bench).crash},
	{"start", microVMs(emptyPool), (*bench).start}, // first: the templates are built by it
	{"clone", microVMs(emptyPool), (*bench).clone},
	{"pause", microVMs(emptyPool), (*bench).pause},
	{"move", microVMs(emptyPool), (*bench).move},
	{"resume", microVMs("browser=0,shell=0,both=1"), (*bench).resume},
}

// extra rows run only when -only names them.
var extra = []row{{"hops", containers(figuresPool), (*bench).hops}, {"written", microVMs(emptyPool), (*bench).written}}

// figuresPool keeps what one round of the rows about one session takes.
const (
	figuresPool = "browser=2,shell=0,both=1"
	emptyPool   = "browser=0,shell=0,both=0"
)

func main() {
	if len(os.Args) == 3 && os.Args[1] == childArg {
		if err := help(os.Args[2]); err != nil {
			fmt.Fprintf(os.Stderr, "bench: %s: %v\n", os.Args[2], err)
			os.Exit(1)
		}
		return
	}
	quick := flag.Bool("quick", false, "fewer rounds, about two minutes")
	only := flag.String("only", "", "rows to run, with commas; default all")
	out := flag.String("out", "scripts/bench/results", "folder for the table, empty for none")
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
	defer stop()
	if err := run(ctx, *quick, *only, *out); err != nil {
		fmt.Fprintln(os.Stderr, "bench:", err)
		os.Exit(1)
	}
}

func run(ctx context.Context, quick bool, only, out string) (err error) {
	chosen, err := choose(only)
	if err != nil {
		return err
	}
	b, err := open(quick)
	if err != nil {
		return err
	}
	defer func() {
		if cerr := b.close(); err == nil {
			err = cerr
		}
	}()
	began := time.Now()
	for _, r := range chosen {
		if err := b.stack.want(ctx, r.setup); err != nil {
			return fmt.Errorf("%s: %w", r.name, err)
		}
		t := time.Now()
		if err := r.run(b, ctx); err != nil {
			return fmt.Errorf("%s: %w", r.name, err)
		}
		fmt.Fprintf(os.Stderr, "  ✓ %s, %.0f s\n", r.name, time.Since(t).Seconds())
	}
	rep := report{Machine: describe(), Quick: quick, Seconds: int(time.Since(began).Seconds()), Figures: b.figures}
	fmt.Print(rep.markdown())
	if out == "" || only != "" { // a part must not pass for the whole
		return nil
	}
	return rep.keep(out)
}

func choose(only string) ([]row, error) {
	if only == "" {
		return rows, nil
	}
	var chosen []row
	known := slices.Concat(rows, extra)
	for name := range strings.SplitSeq(only, ",") {
		i := slices.IndexFunc(known, func(r row) bool { return r.name == name })
		if i < 0 {
			return nil, fmt.Errorf("-only %q: no such row", name)
		}
		chosen = append(chosen, known[i])
	}
	return chosen, nil
}

// bench is one run.
type bench struct {
	quick   bool
	stack   *stack
	peer    *peer // nil until a row wants it
	web     *web  // nil until a row wants it
	figures []figure
	warmed  bool // both hosts of microVMs have the template
	undo    []func() error
}

func open(quick bool) (*bench, error) {
	s, err := newStack()
	if err != nil {
		return nil, err
	}
	return &bench{quick: quick, stack: s, undo: []func() error{s.down}}, nil
}

// close undoes everything in reverse.
func (b *bench) close() error {
	var first error
	for _, undo := range slices.Backward(b.undo) {
		if err := undo(); err != nil && first == nil {
			first = err
		}
	}
	return first
}

// rounds scales the number of rounds of a row.
func (b *bench) rounds(full, quick int) int {
	if b.quick {
		return quick
	}
	return full
}

func (b *bench) add(f figure) {
	f.settle()
	b.figures = append(b.figures, f)
	fmt.Fprintf(os.Stderr, "    %s: %s beside %s, ratio %s\n", f.What, f.show(f.Value), f.show(f.Peer), number(f.Ratio))
}

// interleave runs warm rounds that do not count and then rounds that do, one
// of each side in turn; which goes first changes every round.
func interleave(ctx context.Context, warm, rounds int, sides ...func(ctx context.Context, counts bool) error) error {
	for i := range warm + rounds {
		for j := range sides {
			if err := ctx.Err(); err != nil {
				return err
			}
			if err := sides[turn(i, j, len(sides))](ctx, i >= warm); err != nil {
				return err
			}
		}
	}
	return nil
}

// turn says which of n sides is the jth of round i. Each begins in its turn, and
// every other round goes the other way, so that no side always comes after the
// same one and pays for what that has left behind.
func turn(i, j, n int) int {
	if i%2 == 1 {
		j = n - j
	}
	return (i + j) % n
}
