package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"os"
	"path/filepath"
	"strconv"
	"syscall"
	"time"

	"github.com/berth-dev/berth/shared/apierr"
)

// adminFlags say where the gateway's admin socket is.
type adminFlags struct {
	Home string `help:"The gateway's folder; its admin socket is there." default:"${home}/gateway" env:"BERTH_GATEWAY_HOME" placeholder:"DIR"`
	JSON bool   `help:"Print JSON, for programs." name:"json"`
}

// ask sends one request to the admin socket and decodes the answer.
func (f adminFlags) ask(ctx context.Context, method, path string, in, result any) error {
	socket := filepath.Join(f.Home, "admin.sock")
	client := &http.Client{Timeout: 30 * time.Second, Transport: &http.Transport{DisableKeepAlives: true,
		DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
			return (&net.Dialer{}).DialContext(ctx, "unix", socket)
		}}}
	var body io.Reader
	if in != nil {
		b, err := json.Marshal(in)
		if err != nil {
			return err
		}
		body = bytes.NewReader(b)
	}
	req, err := http.NewRequestWithContext(ctx, method, "http://admin"+path, body)
	if err != nil {
		return err
	}
	if in != nil {
		req.Header.Set("Content-Type", "application/json")
	}
	resp, err := client.Do(req)
	switch {
	case errors.Is(err, os.ErrNotExist):
		return fmt.Errorf("no gateway runs here (%s is missing): start one with 'make run', or name its folder with --home", socket)
	case errors.Is(err, syscall.ECONNREFUSED): // left by a gateway that was killed
		return fmt.Errorf("no gateway runs here (nobody answers at %s): start one with 'make run', or name its folder with --home", socket)
	case errors.Is(err, os.ErrPermission):
		return fmt.Errorf("%s belongs to another user: run this as the gateway's user or as root", socket)
	case err != nil:
		return fmt.Errorf("ask the gateway: %w", err)
	}
	defer resp.Body.Close()
	b, err := io.ReadAll(io.LimitReader(resp.Body, 64<<20))
	if err != nil {
		return err
	}
	if resp.StatusCode >= 300 {
		return errors.New(apierr.Parse(resp.StatusCode, b).Message)
	}
	if result == nil {
		return nil
	}
	return json.Unmarshal(b, result)
}

func printJSON(v any) error {
	enc := json.NewEncoder(out)
	enc.SetIndent("", "  ")
	return enc.Encode(v)
}

type keysCmd struct {
	Create keysCreateCmd `cmd:"" help:"Make an API key, and its project when that is new. The key is shown once."`
	List   keysListCmd   `cmd:"" help:"List keys, without their secrets."`
	Revoke keysRevokeCmd `cmd:"" help:"Make a key fail from now on, for good."`
}

type keysCreateCmd struct {
	adminFlags
	Project string `help:"Project the key belongs to." required:"" placeholder:"NAME"`
	Plan    string `help:"Plan of the project: Free, Hobby, Startup or Scale, or one of your own. A new project without it is Free; on a project that exists it replaces the plan." placeholder:"PLAN"`
}

// newKey is the admin socket's answer to a new key.
type newKey struct {
	Key       string `json:"key"`
	ID        string `json:"id"`
	ProjectID string `json:"projectId"`
}

func (c keysCreateCmd) Run(ctx context.Context) error {
	var k newKey
	if err := c.ask(ctx, http.MethodPost, "/admin/keys", map[string]string{"project": c.Project, "plan": c.Plan}, &k); err != nil {
		return err
	}
	if c.JSON {
		return printJSON(k)
	}
	_, err := fmt.Fprintln(out, k.Key) // alone on its line, for scripts
	return err
}

type keysListCmd struct{ adminFlags }

func (c keysListCmd) Run(ctx context.Context) error {
	var answer struct {
		Data []struct {
			ID        string     `json:"id"`
			ProjectID string     `json:"projectId"`
			Plan      string     `json:"plan"`
			CreatedAt time.Time  `json:"createdAt"`
			RevokedAt *time.Time `json:"revokedAt"`
		} `json:"data"`
	}
	if err := c.ask(ctx, http.MethodGet, "/admin/keys", nil, &answer); err != nil {
		return err
	}
	if c.JSON {
		return printJSON(answer)
	}
	var rows [][]string
	for _, k := range answer.Data {
		state := "good"
		if k.RevokedAt != nil {
			state = "revoked " + k.RevokedAt.Format(time.DateTime)
		}
		rows = append(rows, []string{k.ID, k.ProjectID, k.Plan, k.CreatedAt.Format(time.DateTime), state})
	}
	return table(out, "ID\tPROJECT\tPLAN\tCREATED\tSTATE", rows)
}

type keysRevokeCmd struct {
	adminFlags
	ID string `arg:"" help:"The key's id, from 'berth keys list'."`
}

func (c keysRevokeCmd) Run(ctx context.Context) error {
	return c.ask(ctx, http.MethodDelete, "/admin/keys/"+url.PathEscape(c.ID), nil, nil)
}

type hostsCmd struct{ adminFlags }

func (c hostsCmd) Run(ctx context.Context) error {
	var answer struct {
		Data []struct {
			Name   string         `json:"name"`
			Region string         `json:"region"`
			Driver string         `json:"driver"`
			Free   int            `json:"free"`
			Warm   map[string]int `json:"warm"`
		} `json:"data"`
	}
	if err := c.ask(ctx, http.MethodGet, "/admin/hosts", nil, &answer); err != nil {
		return err
	}
	if c.JSON {
		return printJSON(answer)
	}
	var rows [][]string
	for _, h := range answer.Data {
		rows = append(rows, []string{h.Name, h.Region, h.Driver, strconv.Itoa(h.Free),
			strconv.Itoa(h.Warm["browser"]), strconv.Itoa(h.Warm["shell"]), strconv.Itoa(h.Warm["both"])})
	}
	return table(out, "HOST\tREGION\tDRIVER\tFREE\tWARM BROWSER\tSHELL\tBOTH", rows)
}
