package main

import (
	"bufio"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"strings"
	"time"
)

// child is this program once more, for one role: what it says first are
// addresses; it ends when its input does, so it never outlives the bench.
type child struct {
	cmd   *exec.Cmd
	in    io.WriteCloser
	out   *bufio.Reader
	addrs []string
}

// childArg is the first argument of a child; its role is the second one.
const childArg = "child"

// drain is what a sink is told.
type drain struct {
	Lane   lane
	Target string
}

func startChild(role string, told any) (*child, error) {
	c := &child{cmd: exec.Command("/proc/self/exe", childArg, role)}
	c.cmd.Stderr = os.Stderr
	in, err := c.cmd.StdinPipe()
	if err != nil {
		return nil, err
	}
	out, err := c.cmd.StdoutPipe()
	if err != nil {
		return nil, err
	}
	if err := c.cmd.Start(); err != nil {
		return nil, err
	}
	c.in, c.out = in, bufio.NewReader(out)
	if err := json.NewEncoder(in).Encode(told); err != nil {
		return nil, errors.Join(fmt.Errorf("%s: %w", role, err), c.close())
	}
	line, err := c.out.ReadString('\n')
	if err != nil {
		return nil, errors.Join(fmt.Errorf("%s did not start: %w", role, err), c.close())
	}
	c.addrs = strings.Fields(line)
	return c, nil
}

// result ends a sink and gives the GB/s that it took.
func (c *child) result() (rate float64, err error) {
	c.in.Close()
	_, err = fmt.Fscan(c.out, &rate)
	return rate, err
}

// close ends it; nil is none.
func (c *child) close() error {
	if c == nil {
		return nil
	}
	c.in.Close()
	return c.cmd.Wait()
}

// help is a child's main function.
func help(role string) error {
	in := bufio.NewReader(os.Stdin)
	told, err := in.ReadBytes('\n')
	if err != nil {
		return err
	}
	over := make(chan struct{})
	go func() { defer close(over); _, _ = io.Copy(io.Discard, in) }()
	var addrs []string
	switch role {
	case "bulk-site":
		addrs, err = serveSite(1, pour)
	case "echo-site":
		addrs, err = serveSite(echoPorts, repeat)
	case "sink":
		return swallow(told, over)
	default:
		err = fmt.Errorf("no such role: %q", role)
	}
	if err != nil {
		return err
	}
	fmt.Println(strings.Join(addrs, " "))
	<-over
	return nil
}

// swallow downloads until over, and says how fast that was.
func swallow(told []byte, over <-chan struct{}) error {
	var d drain
	if err := json.Unmarshal(told, &d); err != nil {
		return err
	}
	c, err := d.Lane.open(d.Target)
	if err != nil {
		return err
	}
	defer c.close()
	if _, err := c.Write([]byte("x")); err != nil {
		return err
	}
	b := make([]byte, 64<<10) // as browsers read
	total, began := 0, time.Now()
	for said := false; ; said = true {
		n, err := c.Read(b)
		if err != nil {
			return err
		}
		if !said {
			fmt.Println("running")
		}
		total += n
		select {
		case <-over:
			fmt.Println(float64(total) / float64(time.Since(began).Nanoseconds()))
			return nil
		default:
		}
	}
}
