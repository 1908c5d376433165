package cdp

import (
	"encoding/json"
	"strings"
	"testing"

	"pgregory.net/rapid"
)

func TestLook(t *testing.T) {
	const dir = "/workspace/downloads"
	for name, c := range map[string]struct {
		msg     string
		leave   bool
		reply   string // part of it
		replace string
		naming  bool
		hide    bool
	}{
		"evaluate":            {msg: `{"id":1,"method":"Runtime.evaluate","params":{"expression":"1"}}`},
		"close":               {msg: `{"id":1,"method":"Browser.close"}`, leave: true, reply: `{"id":1,"result":{}}`},
		"close, escaped":      {msg: `{"id":1,"method":"Browser.\u0063lose"}`, leave: true, reply: `{"id":1,"result":{}}`},
		"close, method last":  {msg: `{ "params" : {}, "id":1, "method" : "Browser.close" }`, leave: true, reply: `{"id":1,"result":{}}`},
		"close, in a session": {msg: `{"id":1,"method":"Browser.close","sessionId":"S"}`, leave: true, reply: `"sessionId":"S"`},
		"close as data":       {msg: `{"id":1,"method":"Runtime.evaluate","params":{"expression":"'Browser.close'"}}`},
		"crash is their own":  {msg: `{"id":1,"method":"Browser.crash"}`},
		"not JSON":            {msg: `Browser.close`},
		"no id":               {msg: `{"method":"Browser.close"}`},
		"plain context":       {msg: `{"id":1,"method":"Target.createBrowserContext","params":{"disposeOnDetach":true}}`},
		"empty proxy":         {msg: `{"id":1,"method":"Target.createBrowserContext","params":{"proxyServer":""}}`},
		"proxy":               {msg: `{"id":1,"method":"Target.createBrowserContext","params":{"proxyServer":"http://x:1"}}`, reply: `proxyServer is not allowed`},
		"bypass":              {msg: `{"id":1,"method":"Target.createBrowserContext","params":{"proxyBypassList":"*"}}`, reply: `proxyBypassList is not allowed`},
		"allow":               {msg: `{"id":1,"method":"Browser.setDownloadBehavior","params":{"behavior":"allow","downloadPath":"/home/me"}}`, replace: `{"id":1,"method":"Browser.setDownloadBehavior","params":{"behavior":"allow","downloadPath":"/workspace/downloads"}}`},
		"deny":                {msg: `{"id":1,"method":"Browser.setDownloadBehavior","params":{"behavior":"deny"}}`},
		"page allow":          {msg: `{"id":1,"method":"Page.setDownloadBehavior","params":{"behavior":"allow","downloadPath":"C:\\x"},"sessionId":"S"}`, replace: `{"id":1,"method":"Page.setDownloadBehavior","sessionId":"S","params":{"behavior":"allow","downloadPath":"/workspace/downloads"}}`},
		"by name, events":     {msg: `{"id":1,"method":"Browser.setDownloadBehavior","params":{"behavior":"allowAndName","downloadPath":"/x","eventsEnabled":true}}`, naming: true, replace: `{"id":1,"method":"Browser.setDownloadBehavior","params":{"behavior":"allowAndName","downloadPath":"/workspace/downloads","eventsEnabled":true}}`},
		"by name, no events":  {msg: `{"id":1,"method":"Browser.setDownloadBehavior","params":{"behavior":"allowAndName","downloadPath":"/x"}}`, naming: true, hide: true, replace: `{"id":1,"method":"Browser.setDownloadBehavior","params":{"behavior":"allowAndName","downloadPath":"/workspace/downloads","eventsEnabled":true}}`},
	} {
		t.Run(name, func(t *testing.T) {
			v := look([]byte(c.msg), dir)
			if v.leave != c.leave || v.naming != c.naming || v.hideEvents != c.hide {
				t.Errorf("verdict = %+v", v)
			}
			if (c.reply == "") != (v.reply == nil) || !strings.Contains(string(v.reply), c.reply) {
				t.Errorf("reply = %s, want %s", v.reply, c.reply)
			}
			if string(v.replace) != c.replace {
				t.Errorf("replace = %s, want %s", v.replace, c.replace)
			}
		})
	}
}

// Whatever spelling JSON allows, a close is seen.
func TestLookSeesEverySpelling(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		var method strings.Builder
		for _, r := range methodClose {
			if rapid.Bool().Draw(t, "escape") {
				method.WriteString(`\u00`)
				const hex, upper = "0123456789abcdef", "0123456789ABCDEF"
				digits := rapid.SampledFrom([]string{hex, upper}).Draw(t, "digits")
				method.WriteByte(digits[r>>4])
				method.WriteByte(digits[r&15])
			} else {
				method.WriteRune(r)
			}
		}
		space := rapid.SampledFrom([]string{"", " ", "\n\t"}).Draw(t, "space")
		msg := "{" + space + `"id"` + space + ":3," + space + `"method":` + space + `"` + method.String() + `"}`
		if v := look([]byte(msg), "/d"); !v.leave {
			t.Fatalf("not seen: %s", msg)
		}
	})
}

func FuzzLook(f *testing.F) {
	f.Add([]byte(`{"id":1,"method":"Browser.setDownloadBehavior","params":{"behavior":"allow"}}`))
	f.Add([]byte(`{"id":1,"method":"Target.createBrowserContext","params":null}`))
	f.Add([]byte(`{"id":1,"method":"Browser.setDownloadBehavior","params":{"behavior":"allowAndName","eventsEnabled":"x"}}`))
	f.Fuzz(func(t *testing.T, msg []byte) {
		v := look(msg, "/d")
		for _, b := range [][]byte{v.reply, v.replace} {
			if b != nil && !json.Valid(b) {
				t.Fatalf("%q became invalid JSON %q", msg, b)
			}
		}
		if v.replace != nil && !strings.Contains(string(v.replace), `"downloadPath":"/d"`) {
			t.Fatalf("%q kept its path: %q", msg, v.replace)
		}
	})
}

func BenchmarkLook(b *testing.B) {
	msg := []byte(`{"id":1234,"method":"Runtime.evaluate","params":{"expression":"document.title","returnByValue":true},"sessionId":"0123456789ABCDEF0123456789ABCDEF"}`)
	b.ReportAllocs()
	for b.Loop() {
		look(msg, "/d")
	}
}
