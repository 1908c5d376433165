package cdp

import (
	"bytes"
	"encoding/json"
)

// verdict is what the broker does with a client's message. The zero value
// passes it on untouched.
type verdict struct {
	reply      []byte // to the client, instead of passing the message on
	leave      bool   // the client leaves, after reply
	replace    []byte // passed on instead
	naming     bool   // the client names downloads by GUID from now on
	hideEvents bool   // with naming: the client did not ask for download events
}

// The methods the broker acts on. literals are byte strings one of which any
// such message contains, unless it hides them behind JSON's \u escapes.
const (
	methodClose         = "Browser.close"
	methodContext       = "Target.createBrowserContext"
	methodDownloads     = "Browser.setDownloadBehavior"
	methodPageDownloads = "Page.setDownloadBehavior"
)

var literals = [][]byte{[]byte(methodClose), []byte(methodContext), []byte(".setDownloadBehavior"), []byte(`\u`)}

// command is a CDP message of a client.
type command struct {
	ID        json.RawMessage            `json:"id,omitempty"`
	Method    string                     `json:"method"`
	SessionID string                     `json:"sessionId,omitempty"`
	Params    map[string]json.RawMessage `json:"params,omitempty"`
}

// pageless says of a message that it asks the browser for something that has
// nothing to do with what is open.
func pageless(msg []byte) bool {
	var c command
	return json.Unmarshal(msg, &c) == nil && c.Method == "Browser.getVersion" && c.SessionID == ""
}

// look decides over one message. Nearly all cost the byte search only.
func look(msg []byte, downloads string) verdict {
	suspect := false
	for _, l := range literals {
		if suspect = bytes.Contains(msg, l); suspect {
			break
		}
	}
	if !suspect {
		return verdict{}
	}
	var head struct{ Method string }
	if json.Unmarshal(msg, &head) != nil {
		return verdict{} // Chrome will say what is wrong with it
	}
	switch head.Method {
	case methodClose, methodContext, methodDownloads, methodPageDownloads:
	default:
		return verdict{}
	}
	var c command
	if json.Unmarshal(msg, &c) != nil || len(c.ID) == 0 {
		return verdict{}
	}
	switch c.Method {
	case methodClose:
		return verdict{reply: c.result(), leave: true}
	case methodContext:
		return c.context()
	default:
		return c.downloads(downloads)
	}
}

func (c command) context() verdict {
	for _, field := range []string{"proxyServer", "proxyBypassList"} {
		if v, ok := c.Params[field]; ok && string(v) != `""` && string(v) != "null" {
			return verdict{reply: c.refuse(field + " is not allowed: traffic of this session goes through its own proxy setting (the session's proxy option)")}
		}
	}
	return verdict{}
}

// downloads puts the client's path, which is of the client's machine, aside.
// allowAndName needs events to give files their names; a client that did not
// ask for them does not see them.
func (c command) downloads(dir string) verdict {
	var behavior string
	_ = json.Unmarshal(c.Params["behavior"], &behavior)
	if behavior != "allow" && behavior != "allowAndName" {
		return verdict{}
	}
	c.Params["downloadPath"], _ = json.Marshal(dir)
	var v verdict
	if behavior == "allowAndName" && c.Method == methodDownloads {
		v.naming = true
		v.hideEvents = string(c.Params["eventsEnabled"]) != "true"
		c.Params["eventsEnabled"] = json.RawMessage("true")
	}
	v.replace, _ = json.Marshal(c) // RawMessages came out of valid JSON
	return v
}

type answer struct {
	ID        json.RawMessage `json:"id"`
	Result    *struct{}       `json:"result,omitempty"`
	Error     *answerError    `json:"error,omitempty"`
	SessionID string          `json:"sessionId,omitempty"`
}

type answerError struct {
	Code    int    `json:"code"`
	Message string `json:"message"`
}

func (c command) result() []byte {
	b, _ := json.Marshal(answer{ID: c.ID, Result: &struct{}{}, SessionID: c.SessionID})
	return b
}

// refuse answers with CDP's "server error" code, as Chrome does for commands
// it knows and will not run.
func (c command) refuse(why string) []byte {
	b, _ := json.Marshal(answer{ID: c.ID, Error: &answerError{Code: -32000, Message: why}, SessionID: c.SessionID})
	return b
}
