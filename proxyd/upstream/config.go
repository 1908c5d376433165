package upstream

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"os"
	"regexp"
	"slices"
	"strings"

	"github.com/berth-dev/berth/shared/egress"
)

// ProviderConfig is one provider in the file that LoadProviders reads.
type ProviderConfig struct {
	Name      string        `json:"name"`                // for logs and metrics: a-z, 0-9 and hyphens
	Types     []egress.Type `json:"types"`               // residential, datacenter or both
	Server    string        `json:"server"`              // http://host:port or https://host:port
	Username  string        `json:"username,omitempty"`  // a template, see template
	Password  string        `json:"password,omitempty"`  // a template too
	Lowercase bool          `json:"lowercase,omitempty"` // the provider wants countries as "us", not "US"

	// Restricted are the answers with which the provider says that it does not
	// serve a site.
	Restricted []Pattern `json:"restricted,omitempty"`
}

// Pattern describes an answer: all that is given must hold.
type Pattern struct {
	Status   int    `json:"status,omitempty"`   // 0: any
	Header   string `json:"header,omitempty"`   // the field's name; empty: the status alone says it
	Contains string `json:"contains,omitempty"` // in the field's value, case disregarded; empty: the field is there
}

// matches says whether an answer is one that p describes.
func (p Pattern) matches(status int, header http.Header) bool {
	if p.Status != 0 && p.Status != status {
		return false
	}
	if p.Header == "" {
		return true
	}
	return slices.ContainsFunc(header.Values(p.Header), func(v string) bool {
		return strings.Contains(strings.ToLower(v), strings.ToLower(p.Contains))
	})
}

func (p Pattern) check() error {
	switch {
	case p.Status == 0 && p.Header == "":
		return errors.New("restricted: give a status, a header or both")
	case p.Status != 0 && (p.Status < 300 || p.Status > 599):
		return fmt.Errorf("restricted: status %d is none of a refusal: want 300 to 599", p.Status)
	case p.Header == "" && p.Contains != "":
		return errors.New("restricted: contains without a header")
	}
	return nil
}

// LoadProviders reads the file of --providers: {"providers": [...]}, in order of
// preference. An unknown field or a wrong value is an error that names it.
func LoadProviders(path string) ([]ProviderConfig, error) {
	info, err := os.Stat(path)
	if err != nil {
		return nil, err
	}
	if info.Mode().Perm()&0o007 != 0 {
		return nil, fmt.Errorf("%s: any user of this computer may read the providers' passwords: chmod 600 it", path)
	}
	b, err := os.ReadFile(path)
	if err != nil {
		return nil, err
	}
	var file struct {
		Providers []ProviderConfig `json:"providers"`
	}
	dec := json.NewDecoder(bytes.NewReader(b))
	dec.DisallowUnknownFields()
	if err := dec.Decode(&file); err != nil {
		return nil, fmt.Errorf("%s: %w", path, err)
	}
	if _, err := dec.Token(); !errors.Is(err, io.EOF) {
		return nil, fmt.Errorf("%s: something follows the JSON object", path)
	}
	if _, err := newProviders(file.Providers); err != nil {
		return nil, fmt.Errorf("%s: %w", path, err)
	}
	return file.Providers, nil
}

var providerName = regexp.MustCompile(`^[a-z0-9-]{1,40}$`)

func newProviders(list []ProviderConfig) ([]*provider, error) {
	var out []*provider
	for i, c := range list {
		if !providerName.MatchString(c.Name) {
			return nil, fmt.Errorf("provider %d: name %q: want a-z, 0-9 and hyphens", i, c.Name)
		}
		if slices.ContainsFunc(out, func(p *provider) bool { return p.name == c.Name }) {
			return nil, fmt.Errorf("provider %s is there twice", c.Name)
		}
		p, err := newProvider(c)
		if err != nil {
			return nil, fmt.Errorf("provider %s: %w", c.Name, err)
		}
		out = append(out, p)
	}
	return out, nil
}

func newProvider(c ProviderConfig) (*provider, error) {
	p := &provider{name: c.Name, types: c.Types, lowercase: c.Lowercase, restricted: c.Restricted}
	if len(c.Types) == 0 {
		return nil, errors.New("types: name residential, datacenter or both")
	}
	for _, t := range c.Types {
		if !t.Platform() {
			return nil, fmt.Errorf("types: %q: want residential or datacenter", t)
		}
	}
	for _, r := range c.Restricted {
		if err := r.check(); err != nil {
			return nil, err
		}
	}
	var err error
	if p.at, p.tls, err = parseServer(c.Server); err != nil {
		return nil, fmt.Errorf("server: %w", err)
	}
	if p.username, err = parseTemplate(c.Username); err != nil {
		return nil, fmt.Errorf("username: %w", err)
	}
	if p.password, err = parseTemplate(c.Password); err != nil { // whose text would show a piece of it
		return nil, errors.New("password: brackets and braces are for {country}, {state}, {city} and {session} alone")
	}
	if strings.Contains(c.Username, ":") {
		return nil, errors.New("username: a colon would end it (RFC 7617)")
	}
	return p, nil
}

// parseServer reads http://host:port or https://host:port.
func parseServer(text string) (at egress.Target, tls bool, err error) {
	u, err := url.Parse(text)
	if err != nil || u.Scheme != "http" && u.Scheme != "https" || u.User != nil || u.Path != "" && u.Path != "/" || u.RawQuery != "" || u.Fragment != "" {
		return at, false, errors.New("want http://host:port or https://host:port")
	}
	at, refused := egress.ParseTarget(u.Host)
	if refused != nil {
		return at, false, errors.New(refused.Detail)
	}
	return at, u.Scheme == "https", nil
}
