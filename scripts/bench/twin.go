package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
)

// twin is a container with a machine's own runc configuration (namespaces,
// seccomp, capabilities, limits) in which nothing but sleep runs. runc exec
// cannot enter the machine itself: it joins the user namespace first, and the
// slot's network namespace belongs to the host's. The twin has one of its own.
type twin struct{ dir, id string }

func (s *stack) twin(ctx context.Context, machine string) (*twin, error) {
	b, err := os.ReadFile(filepath.Join(s.home, "hostd", "machines", machine, "config.json"))
	if err != nil {
		return nil, err
	}
	config, err := twinConfig(b, os.Getenv("BERTH_IMAGE_BASE"))
	if err != nil {
		return nil, err
	}
	dir, err := os.MkdirTemp(filepath.Dir(s.home), "berth-bench-runc.")
	if err != nil {
		return nil, err
	}
	t := &twin{dir, "berth-bench-" + machine}
	if err = os.WriteFile(filepath.Join(dir, "config.json"), config, 0o600); err == nil {
		err = t.runc(ctx, "run", "--detach", "--bundle", dir, t.id)
	}
	if err != nil {
		return nil, errors.Join(err, t.close())
	}
	return t, nil
}

// twinConfig changes a machine's config.json (OCI runtime specification).
func twinConfig(machine []byte, image string) ([]byte, error) {
	var c map[string]any
	if err := json.Unmarshal(machine, &c); err != nil {
		return nil, err
	}
	process, _ := c["process"].(map[string]any)
	linux, _ := c["linux"].(map[string]any)
	if process == nil || linux == nil {
		return nil, errors.New("config.json has no process or no linux")
	}
	process["args"] = []string{"sleep", "infinity"}
	c["root"] = map[string]any{"path": image, "readonly": true}
	linux["cgroupsPath"] = "/berth-bench-runc"
	spaces, _ := linux["namespaces"].([]any)
	for _, n := range spaces {
		delete(n.(map[string]any), "path")
	}
	resources, _ := linux["resources"].(map[string]any)
	delete(resources, "cpu") // the waiting machine's small share; a session has the full one
	var mounts []any
	for _, m := range c["mounts"].([]any) {
		if m.(map[string]any)["type"] != "bind" { // the image has no place for it
			mounts = append(mounts, m)
		}
	}
	c["mounts"] = mounts
	return json.Marshal(c)
}

func (t *twin) runc(ctx context.Context, args ...string) error {
	cmd := exec.CommandContext(ctx, "runc", append([]string{"--root", filepath.Join(t.dir, "state")}, args...)...)
	log, err := os.Create(filepath.Join(t.dir, "log")) // a pipe would wait for the container
	if err != nil {
		return err
	}
	defer log.Close()
	cmd.Stdout, cmd.Stderr = log, log
	if err := cmd.Run(); err != nil {
		says, _ := os.ReadFile(log.Name())
		return fmt.Errorf("runc %s: %w: %s", args[0], err, says)
	}
	return nil
}

func (t *twin) exec(ctx context.Context) error {
	return t.runc(ctx, "exec", "--user", "1000:1000", t.id, "true")
}

func (t *twin) close() error {
	err := t.runc(context.Background(), "delete", "--force", t.id)
	return errors.Join(err, os.RemoveAll(t.dir))
}
