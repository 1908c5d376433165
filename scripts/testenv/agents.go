package testenv

import (
	"bytes"
	"fmt"
	"os"
	"strings"
)

// agentRaces looks into the consoles of the machines that run now for what the
// race detector or a panic wrote there. A console is a file that only the
// machine's first process still has a name for, in /proc.
func (e *Env) agentRaces() error {
	var found []string
	for _, pid := range e.agents() {
		b, err := os.ReadFile(procPath(pid, "fd/2"))
		if err != nil {
			continue // it has ended
		}
		for _, mark := range []string{"WARNING: DATA RACE", "panic: ", "fatal error: "} {
			if at := bytes.Index(b, []byte(mark)); at >= 0 {
				found = append(found, string(b[at:min(len(b), at+6000)]))
			}
		}
	}
	if len(found) == 0 {
		return nil
	}
	return fmt.Errorf("an agent's console has\n%s", strings.Join(found, "\n"))
}

// agents are the first processes of this stack's machines.
func (e *Env) agents() []int {
	var out []int
	for _, pid := range pids() {
		if e.ours(pid) && !e.ours(parentOf(pid)) {
			out = append(out, pid)
		}
	}
	return out
}
