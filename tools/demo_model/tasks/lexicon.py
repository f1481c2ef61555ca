"""Words that the generated tasks are made of."""

NOUNS = """anchor apple arrow attic badge bakery ball banjo barn basket beacon bell bench bicycle blanket boat book bottle bowl box branch
bread bridge brush bucket button cabin cable cake camera candle canoe card carpet castle cat cave chair cheese chest clock cloud coat coin
comb compass copper cord cottage cradle crane crown cup curtain desk diary door dragon drawer dress drum eagle engine envelope falcon farm
feather fence ferry fiddle field file flag flute forest fork fountain fox garden gate glass globe glove goat grain guitar hammer harbor harp
hat hill horn horse house island ivory jacket jar jewel journal kettle key kite kitchen knife ladder lake lamp lantern leaf lemon letter
library lion lock loom magnet map marble market mask meadow medal melon mill mirror monkey moon mountain mug needle nest net notebook oak
ocean onion orchard oven owl paddle page painting palace paper parcel path pearl pebble pen pepper piano picture pigeon pillow pipe planet
plate plum pocket pond pony potato quilt rabbit radio raft rail ring river robe rocket roof rope rose saddle sail salt scarf school seal
shelf shell ship shirt shoe shovel silver spoon spring stable staircase star statue stone stove street sugar sword table tent tiger tower
town train tree trumpet tunnel valley vase village violin wagon wall watch well wheel whistle window wolf yard""".split()

ADJECTIVES = """amber ancient bitter black blue bold brave bright broken bronze busy calm clean clever cold cool crimson curious dark deep
dry dusty eager early empty fair fancy fast final flat fresh gentle giant golden grand gray green happy hard heavy hidden hollow honest hot
huge humble icy iron jolly kind large late lazy light little lively lonely long loud lucky mellow mild misty modern narrow new noble northern
odd old orange pale plain polite proud purple quick quiet rapid rare red rich round royal rusty sharp shiny short silent simple slow small
smooth soft solid southern steady steep strange strong sunny sweet swift tall tame thin tiny tired warm weak wet white wide wild wise wooden
yellow young""".split()

NAMES = """Ada Adam Agnes Alan Alice Amy Andrew Anna Arthur Ben Bella Carl Carol Clara Colin Daniel David Diana Edith Edward Ella Emma Eric
Eva Felix Fiona Frank Fred George Grace Hannah Harry Helen Henry Hugo Ida Irene Isaac Ivan Jack James Jane Janet John Julia Karen Karl Kate
Kevin Laura Leo Lily Louis Lucy Luke Mabel Maria Mark Martha Martin Mary Max Mia Nadia Nancy Nina Nora Oliver Olga Oscar Otto Paul Peter Ralph
Rita Robert Rosa Ruth Sam Sara Simon Sofia Stella Susan Thomas Tom Vera Victor Walter Wendy""".split()

CITIES = """Amsterdam Athens Austin Barcelona Bergen Berlin Bern Boston Brussels Cairo Chicago Copenhagen Dallas Delhi Denver Dublin Florence
Geneva Hamburg Helsinki Istanbul Kyoto Lagos Lima Lisbon London Madrid Manila Milan Montreal Moscow Mumbai Munich Nairobi Naples Oslo Paris
Porto Prague Quito Rome Santiago Seattle Seoul Seville Sofia Stockholm Sydney Tokyo Toronto Turin Vienna Warsaw Zurich""".split()

COLORS = "red green blue yellow orange purple white black gray brown pink golden".split()
FRUITS = "apples pears plums lemons melons oranges bananas cherries figs grapes".split()
PETS = "cat dog rabbit parrot pony goldfish turtle hamster".split()
JOBS = "baker carpenter doctor engineer farmer gardener lawyer musician nurse painter pilot sailor singer teacher writer".split()
DAYS = "Monday Tuesday Wednesday Thursday Friday Saturday Sunday".split()
MONTHS = "January February March April May June July August September October November December".split()
LANGUAGES = "French German Spanish Italian Dutch Greek Polish Swedish Turkish Japanese".split()
ROOMS = "kitchen bedroom bathroom hall office garage attic cellar garden library".split()
CURRENCIES = "USD EUR GBP JPY CHF SEK".split()
VERBS = {  # for made-up tools: the verb in the name, and how people ask
    "find": ["find", "look up", "search for"], "create": ["create", "make", "set up"], "delete": ["delete", "remove"],
    "update": ["update", "change"], "open": ["open"], "close": ["close", "shut"], "book": ["book", "reserve"], "order": ["order", "buy"],
    "print": ["print"], "rename": ["rename"], "count": ["count"], "move": ["move"], "check": ["check", "inspect"], "send": ["send"],
    "start": ["start", "launch"], "stop": ["stop", "halt"],
}
