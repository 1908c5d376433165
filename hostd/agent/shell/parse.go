package shell

import (
	"encoding/json"
	"os"
	"regexp"
	"strings"
	"time"
)

// MaxCommand is the longest command in bytes.
const MaxCommand = 4 << 20

const defaultTimeout = 120 * time.Second

var variableForm = regexp.MustCompile(`^[A-Za-z_][A-Za-z0-9_]*$`)

// request is the body of exec as it came; pointers tell absent from zero.
type request struct {
	Command   *string            `json:"command"`
	TimeoutMs *int64             `json:"timeoutMs"`
	Cwd       *string            `json:"cwd"`
	Env       map[string]*string `json:"env"`
	Shell     json.RawMessage    `json:"shell"`
	Stream    bool               `json:"stream"`
}

// parse checks a request; errors are 400 naming the field.
func (s *Shells) parse(r *request) (c *Command, err error) {
	c = &Command{Timeout: defaultTimeout}
	if r.Command == nil || *r.Command == "" {
		return nil, invalid("command: must be a command for bash")
	}
	if c.Text = *r.Command; len(c.Text) > MaxCommand {
		return nil, invalid("command: must be at most %d bytes", MaxCommand)
	}
	if strings.ContainsRune(c.Text, 0) {
		return nil, invalid("command: must not contain a NUL character")
	}
	if r.TimeoutMs != nil {
		if *r.TimeoutMs < 1 || *r.TimeoutMs > maxTimeout.Milliseconds() {
			return nil, invalid("timeoutMs: must be 1 to %d", maxTimeout.Milliseconds())
		}
		c.Timeout = time.Duration(*r.TimeoutMs) * time.Millisecond
	}
	if c.Shell, err = shellName(r.Shell); err != nil {
		return nil, err
	}
	if c.Env, err = variables(r.Env); err != nil {
		return nil, err
	}
	if r.Cwd != nil {
		c.Cwd, err = s.folderFor(*r.Cwd)
	}
	return c, err
}

// shellName reads a name, false ("") or nothing (Default).
func shellName(raw json.RawMessage) (string, error) {
	switch string(raw) {
	case "", "null":
		return Default, nil
	case "false":
		return "", nil
	}
	var name string
	if json.Unmarshal(raw, &name) != nil || !nameForm.MatchString(name) {
		return "", badName("shell")
	}
	return name, nil
}

func variables(env map[string]*string) (map[string]string, error) {
	out := make(map[string]string, len(env))
	for k, v := range env {
		switch {
		case !variableForm.MatchString(k):
			return nil, invalid("env: %q is not a variable's name (letters, digits and '_', not a digit first)", cut(k, 64))
		case v == nil:
			return nil, invalid("env.%s: must be a string", cut(k, 64))
		case strings.ContainsRune(*v, 0):
			return nil, invalid("env.%s: must not contain a NUL character", cut(k, 64))
		}
		out[k] = *v
	}
	return out, nil
}

// folderFor is the absolute path of a folder inside the workspace. That the
// customer may change the tree right afterwards does not matter: the command
// runs as the customer and may go anywhere.
func (s *Shells) folderFor(path string) (string, error) {
	t := s.cfg.Workspace
	rel, err := t.Resolve("cwd", path)
	if err != nil {
		return "", err
	}
	info, err := t.Root.Stat(rel)
	if os.IsNotExist(err) || err == nil && !info.IsDir() {
		return "", invalid("cwd: must be an existing directory, %s is not", path)
	}
	if err != nil {
		return "", t.Error("cwd", path, err)
	}
	return t.Abs(rel), nil
}
