// Command berth is the operator's and newcomer's tool: API keys, hosts, use
// and plans, and a demonstration of the whole path.
package main

import (
	"context"
	"fmt"
	"io"
	"os"
	"text/tabwriter"

	"github.com/berth-dev/berth/shared/daemon"
)

// commandLine is what berth understands.
type commandLine struct {
	Keys   keysCmd   `cmd:"" help:"API keys: create, list, revoke. Run it on the gateway's computer."`
	Hosts  hostsCmd  `cmd:"" help:"The living hosts and what is free there. Run it on the gateway's computer."`
	Usage  usageCmd  `cmd:"" help:"What projects used and what that costs. Run it on the gateway's computer."`
	Plans  plansCmd  `cmd:"" help:"The plans, and how to change them. Run it on the gateway's computer."`
	Doctor doctorCmd `cmd:"" help:"Look at this computer as a host: virtualisation, memory, limits, kernel and tools; say what to mend."`
	Demo   demoCmd   `cmd:"" help:"Try everything once: a session, a page served by its shell, a click, a screenshot."`
}

func main() {
	var cl commandLine
	cmd := daemon.Parse(&cl, "berth", "Berth: isolated machines with a real browser and a real shell.")
	daemon.Main("berth", func(ctx context.Context) error {
		cmd.BindTo(ctx, (*context.Context)(nil))
		return cmd.Run()
	})
}

// table prints rows under a head, for people.
func table(w io.Writer, head string, rows [][]string) error {
	tw := tabwriter.NewWriter(w, 2, 4, 2, ' ', 0)
	fmt.Fprintln(tw, head)
	for _, r := range rows {
		for i, cell := range r {
			if i > 0 {
				fmt.Fprint(tw, "\t")
			}
			fmt.Fprint(tw, cell)
		}
		fmt.Fprintln(tw)
	}
	return tw.Flush()
}

var out io.Writer = os.Stdout
